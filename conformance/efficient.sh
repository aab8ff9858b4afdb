#!/usr/bin/env bash
# Makes efficient.ptx.gz anew from efficient.cu and the headers of torch: a minute, and packages of 1 GB.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=$(mktemp --directory)
trap 'rm -rf "$packages"' EXIT
"${PYTHON:-python3}" -m pip install --quiet --no-deps --target "$packages" nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 \
    nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cutlass==4.2.0.0 \
    nvidia-curand==10.4.4.72 nvidia-cublas==13.8.2.12
torch=$(.venv-conformance-triton/bin/python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent)')
cuda=$packages/nvidia/cu13
"$cuda/bin/nvcc" -ptx -std=c++20 -O3 -DNDEBUG -arch=sm_80 --expt-relaxed-constexpr -I"$torch/include" \
    -I"$packages/cutlass_library/source/include" -I"$cuda/include" -I"$cuda/include/cccl" \
    -o "$packages/efficient.ptx" conformance/efficient.cu
# Without the tables that the kernel does not read, which are most of it.
sed --regexp-extended '/^\.(global|const) /d' "$packages/efficient.ptx" | gzip --best --no-name >conformance/efficient.ptx.gz
