#!/usr/bin/env bash
# Makes flash_attn_2_*.ptx.gz anew from flash_attn_2.cu and the headers of flash-attn and torch: some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
source conformance/nvcc.sh

install_nvcc
python=.venv-conformance/bin/python # which has what the package asks for to be unpacked
version=$(grep --only-matching '^flash-attn==[^ ]*' conformance/requirements.txt)
FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE "$python" -m pip download --quiet --no-deps \
    --no-build-isolation --no-binary :all: --dest "$packages" "$version"
tar --extract --gzip --file "$packages"/flash_attn-*.tar.gz --directory "$packages"
flash=$(echo "$packages"/flash_attn-*/csrc)
torch=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent)')
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
compile_ptx conformance/flash_attn_2.cu -std=c++20 --use_fast_math --expt-extended-lambda -I"$flash/flash_attn" \
    -I"$flash/flash_attn/src" -I"$flash/cutlass/include" -I"$torch/include" -I"$headers"
for width in 32 128; do keep_kernel flash_attn_2_$width; done
