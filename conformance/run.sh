#!/usr/bin/env bash
# Runs the GPU paths of qattn on a CPU: interpreted, compiled for GPUs that are not there, or emulated. Environments of
# its own hold the packages. One that cannot be had fails the run; with QATTN_CONFORMANCE_PARTIAL=1 the others suffice.
# Prints at the end which path was held to which bound by which evidence, and what was not run. With RECORD=1 that table
# is kept in benchmarks/records/conformance.json, if nothing failed.
set -euo pipefail
cd "$(dirname "$0")/.."

LOGS=$(mktemp --directory)
export QATTN_EVIDENCE=$LOGS/evidence
touch "$QATTN_EVIDENCE"
trap 'for pid in $(jobs -p); do kill -- "-$pid" 2>/dev/null; done; rm -rf "$LOGS"' EXIT
set -m # each part is a group of processes, which ends with this script

# Makes the environment $1 from the requirements $2, of which those that match $3 are installed without dependencies.
# A copy of the requirements is written last, so that a broken install is made again. If there is none, and that is
# allowed, the tests that ask for it are left out, and the table says so.
environment() {
    local venv=$1 requirements=$2 alone=$3 log=$1/install.log
    cmp --silent "$requirements" "$venv/requirements.txt" && return
    "${PYTHON:-python3}" -m venv --clear "$venv"
    echo "conformance: installing $requirements into $venv"
    if ! install_packages "$venv/bin/python" "$requirements" "$alone" >"$log" 2>&1; then
        local reason
        reason=$(grep --extended-regexp '^(ERROR|error):' "$log" | tail -n 1 || true)
        reason=${reason:-pip failed without naming an error}
        echo "conformance: $requirements cannot be installed: $reason (all of it is in $log)"
        "${PYTHON:-python3}" conformance/table.py "$QATTN_EVIDENCE" --missing "$requirements" "$reason"
        return 1
    fi
    cp "$requirements" "$venv/requirements.txt"
}

missing() { # what a part returns whose environment cannot be had
    test "${QATTN_CONFORMANCE_PARTIAL:-}" = 1
}

install_packages() { # called as a condition, where `set -e` has no effect: hence the &&
    "$1" -m pip install --requirement <(grep --extended-regexp --invert-match "$3" "$2") &&
        # Forced, as flash-attn would otherwise go and look for a wheel built for CUDA.
        FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE "$1" -m pip install \
            --no-build-isolation --no-deps --requirement <(grep --extended-regexp "$3" "$2") &&
        "$1" -m pip install --no-build-isolation --no-deps --editable .
}

# The options of the repository's own pytest are not for these environments; the warnings are Triton's, of itself.
test_with() {
    local venv=$1
    shift
    PYTHONPATH=tests:conformance:benchmarks "$venv/bin/python" -m pytest -c /dev/null --rootdir=. -p no:cacheprovider \
        -W ignore::DeprecationWarning -W ignore::RuntimeWarning "$@"
}

# flash-attn's kernels are Triton's with the first variable, and interpreted with the second.
flash_attn_2() {
    environment .venv-conformance conformance/requirements.txt '^(triton|flash-attn)==' || { missing; return; }
    FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE TRITON_INTERPRET=1 \
        test_with .venv-conformance conformance/test_flash_attn.py "$@"
}

# Triton reads the variable when a kernel is defined, so what is interpreted and what is compiled are two processes.
triton_kernels() {
    local failed=0
    environment .venv-conformance-triton conformance/requirements-triton.txt '^(triton|xformers|mslk-cuda)==' ||
        { missing; return; }
    TRITON_INTERPRET=1 test_with .venv-conformance-triton conformance/*_interpreted.py "$@" || failed=1
    test_with .venv-conformance-triton conformance/*_compiled.py conformance/*_emulated.py "$@" || failed=1
    return $failed
}

# xformers does not import where flash-attn-4 is installed alone.
flash_attn_4() {
    local failed=0 capability
    environment .venv-conformance-fa4 conformance/requirements-fa4.txt \
        '^(triton|flash-attn-4|nvidia-.*|apache-.*|torch-c-.*|quack-.*|cuda-.*|protobuf)==' || { missing; return; }
    for capability in 80 90 120; do
        FLASH_ATTENTION_ARCH=sm_$capability test_with .venv-conformance-fa4 conformance/test_flash_attn_4.py "$@" || failed=1
    done
    return $failed
}

# Together, as each of them takes one core; what they print is shown one after the other.
status=0
declare -A running
for part in triton_kernels flash_attn_4 flash_attn_2; do
    $part "$@" >"$LOGS/$part" 2>&1 &
    running[$part]=$!
done
for part in triton_kernels flash_attn_4 flash_attn_2; do
    wait "${running[$part]}" || status=1
    cat "$LOGS/$part"
done

test $status = 0 || RECORD=
"${PYTHON:-python3}" conformance/table.py "$QATTN_EVIDENCE" ${RECORD:+--record}
exit $status
