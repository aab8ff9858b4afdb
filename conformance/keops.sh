#!/usr/bin/env bash
# Makes keops.ptx.gz anew from the code that KeOps writes: a minute.
set -euo pipefail
cd "$(dirname "$0")/.."
source conformance/nvcc.sh

install_nvcc keopscore==2.3
KEOPS_CACHE_FOLDER="$packages" PYTHONPATH="$packages" "${PYTHON:-python3}" conformance/keops.py "$packages/keops.cu"
compile_ptx "$packages/keops.cu" --use_fast_math # as KeOps compiles it
keep_kernel keops
