#!/usr/bin/env bash
# Runs the real flash-attn package on a CPU, through qattn's adapter, in an environment of its own.
# Packages that cannot be had are a reason to skip; nothing else is.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-conformance
python=$venv/bin/python
requirements=conformance/requirements.txt
stamp=$venv/requirements.txt  # the requirements it was made from: copied last, so a broken install is made again
log=$venv/install.log
alone='^(triton|flash-attn)=='

install_packages() { # called as a condition, where `set -e` has no effect: hence the &&
    "$python" -m pip install --requirement <(grep --extended-regexp --invert-match "$alone" "$requirements") &&
        # Forced, as it would otherwise go and look for a wheel built for CUDA.
        FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE "$python" -m pip install \
            --no-build-isolation --no-deps --requirement <(grep --extended-regexp "$alone" "$requirements")
}

if ! cmp --silent "$requirements" "$stamp"; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
    echo "conformance: installing flash-attn and what it runs with into $venv"
    if ! install_packages >"$log" 2>&1; then
        reason=$(grep --extended-regexp '^(ERROR|error):' "$log" | tail -n 1 || true)
        echo "conformance skipped: ${reason:-pip failed without naming an error} (all of it is in $log)"
        exit 0
    fi
    # Without its dependencies: numba and scipy serve what is not tested here.
    "$python" -m pip install --quiet --no-build-isolation --no-deps --editable .
    cp "$requirements" "$stamp"
fi

# The package's kernels are Triton's with the first, and Python's with the second. The options of the repository's own
# pytest are not for this environment; the warnings are Triton's, of itself.
FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE TRITON_INTERPRET=1 "$python" -m pytest \
    -c /dev/null --rootdir=. -p no:cacheprovider -W ignore::DeprecationWarning conformance/test_flash_attn.py "$@"
