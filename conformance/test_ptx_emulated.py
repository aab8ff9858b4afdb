"""The emulator of PTX, on a few lines of it: what other evidence is made of must itself be right."""

import numpy as np
import ptx
import pytest

HEAD = """
.visible .entry kernel(
.param .u64 .ptr .global .align 1 kernel_param_0,
.param .u64 .ptr .global .align 1 kernel_param_1,
.param .f32 kernel_param_2)
.reqntid 32
{
ld.param.b64 %rd1, [kernel_param_0];
ld.param.b64 %rd2, [kernel_param_1];
ld.param.b32 %r9, [kernel_param_2];
mov.u32 %r1, %tid.x;
mad.wide.u32 %rd3, %r1, 4, %rd1;
mad.wide.u32 %rd4, %r1, 4, %rd2;
"""


def run(body: str, source: np.ndarray, target: np.ndarray, number: float = 0.0) -> np.ndarray:
    ptx.launch(ptx.Program.parse(HEAD + body + "\nret;\n}"), (1,), [source, target, number], 1024)
    return target


def test_arithmetic_is_that_of_float32() -> None:
    x = np.random.default_rng(0).normal(size=32).astype(np.float32)
    body = "ld.global.b32 %r2, [%rd3];\nfma.rn.f32 %r3, %r2, %r2, %r9;\nst.global.b32 [%rd4], %r3;"
    expected = (x.astype(np.float64) ** 2 + np.float64(np.float32(0.1))).astype(np.float32)
    np.testing.assert_array_equal(run(body, x, np.zeros(32, np.float32), 0.1), expected)


def test_threads_that_diverge_meet_again() -> None:
    """Lanes below 10 loop three times, others not at all; then all of them exchange numbers."""
    body = """
    mov.b32 %r2, 0;
    setp.lt.u32 %p1, %r1, 10;
    @!%p1 bra $L_end;
$L_loop:
    add.s32 %r2, %r2, 1;
    setp.lt.s32 %p2, %r2, 3;
    @%p2 bra $L_loop;
$L_end:
    shfl.sync.bfly.b32 %r3, %r2, 16, 31, -1;
    st.global.b32 [%rd4], %r3;
    """
    expected = np.where((np.arange(32) ^ 16) < 10, 3, 0)
    np.testing.assert_array_equal(run(body, np.zeros(32, np.int32), np.zeros(32, np.int32)), expected)


@pytest.mark.parametrize(("body", "message"), [
    ("ld.global.b32 %r2, [%rd3 + 2];", "not aligned"),
    ("ld.global.b32 %r2, [%rd3 + 4];", "outside of all arrays"),
    ("setp.lt.u32 %p1, %r1, 10;\n@%p1 bra $L_end;\nbar.sync 0;\n$L_end:", "barrier"),
])  # fmt: skip
def test_what_a_gpu_would_not_forgive(body, message) -> None:
    with pytest.raises(ValueError, match=message):
        run(body, np.zeros(32, np.float32), np.zeros(32, np.float32))


def test_shared_memory_starts_as_nan() -> None:
    body = "mov.b32 %r2, 0;\nld.shared.b32 %r3, [%r2 + 16];\nst.global.b32 [%rd4], %r3;"
    assert np.isnan(run(body, np.zeros(32, np.float32), np.zeros(32, np.float32))).all()


def test_tensor_cores_keep_11_bits_and_truncate() -> None:
    """One element a thread: the others are 0, so that D = A B has one product a row and column at most."""
    body = """
    ld.global.b32 %r2, [%rd3];
    mov.b32 %r3, 0;
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r4, %r5, %r6, %r7}, {%r2, %r3, %r3, %r3}, {%r2, %r3}, NINES;
    st.global.b32 [%rd4], %r4;
    """.replace("NINES", "{%r9, %r9, %r9, %r9}")
    x = np.random.default_rng(0).normal(size=32).astype(np.float32)
    found = run(body, x, np.zeros(32, np.float32), 1.0)
    kept = (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64).reshape(8, 4)  # row, k
    exact = 1.0 + kept @ kept.T  # B has columns where A has rows
    row, column = np.arange(32) // 4, 2 * (np.arange(32) % 4)
    expected = exact[row, column]
    assert (np.abs(found) <= np.abs(expected)).all()
    np.testing.assert_allclose(found, expected, rtol=2.0**-23)
