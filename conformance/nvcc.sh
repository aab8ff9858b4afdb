# Sourced: installs nvcc from the package index into a folder that is removed at the end, and keeps what it compiles.
packages=$(mktemp --directory)
trap 'rm -rf "$packages"' EXIT
cuda=$packages/nvidia/cu13

# Installs nvcc, and further packages.
install_nvcc() {
    "${PYTHON:-python3}" -m pip install --quiet --no-deps --target "$packages" nvidia-cuda-nvcc==13.0.88 \
        nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 "$@"
}

# Compiles $1 to $packages/kernels.ptx, with further options.
compile_ptx() {
    local source=$1
    shift
    "$cuda/bin/nvcc" -ptx -O3 -DNDEBUG -arch=sm_80 --expt-relaxed-constexpr "$@" -I"$cuda/include" -I"$cuda/include/cccl" \
        -o "$packages/kernels.ptx" "$source"
}

# Keeps the kernel $1 as conformance/$1.ptx.gz: without the others, and without tables that it does not read.
keep_kernel() {
    awk -v wanted="$1" '/^\.visible \.entry / { kept = index($0, " " wanted "(") > 0; begun = 1 } !begun || kept' \
        "$packages/kernels.ptx" | sed --regexp-extended '/^\.(global|const) /d' | gzip --best --no-name >"conformance/$1.ptx.gz"
}
