#!/usr/bin/env bash
# Makes efficient.ptx.gz anew from efficient.cu and the headers of torch: a minute, and packages of 1 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
source conformance/nvcc.sh

install_nvcc nvidia-cutlass==4.2.0.0 nvidia-curand==10.4.4.72 nvidia-cublas==13.8.2.12
torch=$(.venv-conformance-triton/bin/python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent)')
compile_ptx conformance/efficient.cu -std=c++20 -I"$torch/include" -I"$packages/cutlass_library/source/include"
keep_kernel efficient
