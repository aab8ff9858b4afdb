"""Wrong input, one by one: the error, the argument, the remedy."""

import numpy as np
import pytest
import torch

from qattn import GaussianKernel, GraphKernel, MatrixKernel, Solver, attend, diffuse, diffusion, ragged, sinkhorn
from qattn._broadcasting import broadcast_shapes

POINTS = torch.randn(10, 3)
NAN = torch.tensor([[0.0, torch.nan, 0.0], [torch.inf, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((np.zeros((4, 3)), POINTS), {}, TypeError, "`query` should be a torch.Tensor; got ndarray. Convert it with"),
        ((POINTS, POINTS.long()), {}, ValueError, "`key` should be of floating point; got int64"),
        ((POINTS[0], POINTS), {}, ValueError, r"`query` should have shape \(\*batch, N, D\); got \(3,\)"),
        ((POINTS[:, :0], POINTS[:, :0]), {}, ValueError, "at least one coordinate"),
        ((POINTS, POINTS[:, :2]), {}, ValueError, r"as many coordinates as `query` \(10, 3\).*got \(10, 2\)"),
        ((POINTS, POINTS, POINTS[:4]), {}, ValueError, r"a row for each key of `key` \(10, 3\).*got \(4, 3\)"),
        (
            (POINTS, POINTS),
            {"bias": POINTS[:3, 0]},
            ValueError,
            r"a number for each key of `key` \(10, 3\).*got \(3,\)",
        ),
        (
            (torch.randn(2, 5, 3), torch.randn(3, 5, 3)),
            {},
            ValueError,
            r"should broadcast.*`query` \(2,\), `key` \(3,\)",
        ),
        ((POINTS, POINTS.double()), {}, ValueError, "`key` should have the dtype of `query`, float32; got float64"),
        ((POINTS, POINTS.to("meta")), {}, ValueError, "`key` should be on the device of `query`, cpu; got meta"),
        ((NAN, POINTS), {}, ValueError, "`query` should be finite; 2 of its 6 numbers are NaN or infinite"),
        ((POINTS, NAN), {}, ValueError, "`key` should be finite; 2 of its 6 numbers"),
        ((POINTS, POINTS), {"bias": torch.full((10,), torch.nan)}, ValueError, "`bias` should be finite, or −inf"),
        ((POINTS, POINTS), {"bias": torch.full((10,), torch.inf)}, ValueError, "`bias` should be finite, or −inf"),
        ((POINTS, POINTS), {"tol": 0.0}, ValueError, "`tol` should be positive"),
    ],
)
def test_wrong_input_is_worded(arguments, options, error, message):
    with pytest.raises(error, match=message):
        attend(*arguments, **options)


KERNEL = GaussianKernel(POINTS, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: diffusion(torch.tensor([[0.0, torch.nan]]), 1.0),
            "`points` should be finite; 1 of its 2 numbers are NaN",
        ),
        (lambda: diffusion(torch.tensor([[0.0, torch.inf]]), 1.0), "Drop those points first, or set them to 0"),
        (
            lambda: diffusion(POINTS[:, 0], 1.0),
            r"`points` should have shape \(\*batch, N, d\); got \(10,\).*\[:, None\]",
        ),
        (lambda: diffusion(POINTS[:0], 1.0), "`points` should hold at least one point"),
        (lambda: diffusion(np.ones((3, 2), dtype=complex), 1.0), "`points` should be real numbers; got complex128"),
        (lambda: diffusion(POINTS), "`sigma` should be given with points"),
        (lambda: diffusion(KERNEL, 1.0), "`sigma` should not be given with a kernel. Set them when making the kernel"),
        (lambda: diffusion(KERNEL, backend="sdpa"), "`backend` should not be given with a kernel"),
        (lambda: diffusion(POINTS, 0.0), "`sigma` should be positive and finite; got 0.0"),
        (lambda: diffusion(POINTS, -1.0), "`sigma` should be positive and finite; got -1.0"),
        (lambda: diffusion(POINTS, torch.nan), "`sigma` should be positive and finite; got nan"),
        (lambda: diffusion(POINTS, [1.0, -1.0]), "`sigma` should be positive and finite; got some that are not"),
        (lambda: diffusion(POINTS, torch.ones(2, 2)), r"`sigma` should be a number, or of shape \(H,\).*got \(2, 2\)"),
        (
            lambda: diffusion(POINTS, 1.0, method="magic"),
            "`method` should be 'auto' or 'exact' or 'tiles' or 'fourier'; got 'magic'",
        ),
        (lambda: diffusion(POINTS, 1.0, normalization="typo"), "`normalization` should be 'sinkhorn' or 'row' or"),
        (
            lambda: diffusion(POINTS, 1.0, solver=Solver(adjoint="typo")),
            "`adjoint` should be 'implicit' or 'unroll' or 'detach'",
        ),
        (
            lambda: diffusion(POINTS, 1.0, solver=Solver(iteration="typo")),
            "`iteration` should be 'chebyshev' or 'plain'",
        ),
        *(
            (
                lambda n=name: diffusion(POINTS, 1.0, normalization=n, solver=Solver(adjoint="typo")),
                "`adjoint` should be 'implicit'",
            )
            for name in ("row", "symmetric", "none")
        ),
        (
            lambda: diffusion(POINTS, 1.0, normalization="row", solver=Solver(iteration="typo")),
            "`iteration` should be 'chebyshev'",
        ),
        (
            lambda: diffusion(POINTS, 1.0, normalization="row", solver=Solver(max_iter=-3)),
            "`max_iter` should be .* at least 1; got -3",
        ),
        (lambda: diffusion(POINTS, 1.0, tol=-1), "`tol` should be 0 or more, and finite; got -1"),
        (
            lambda: diffusion(POINTS, 1.0, solver=Solver(max_iter=0)),
            "`max_iter` should be an integer of at least 1; got 0",
        ),
        (lambda: diffusion(POINTS, 1.0, -torch.ones(10)), "`mass` should not be negative; 10 of its 10 numbers are"),
        (lambda: diffusion(POINTS, 1.0, torch.zeros(10)), "`mass` should have a positive sum in each cloud"),
        (lambda: diffusion(POINTS, 1.0, torch.full((10,), torch.nan)), "`mass` should be finite"),
        (lambda: diffusion(POINTS, 1.0, torch.ones(4)), r"`mass` should have shape \(10,\).*got \(4,\)"),
        (lambda: diffusion(POINTS, 1.0, 1.0), r"`mass` should have shape \(10,\).*got \(\)"),
        (lambda: diffusion(POINTS, 1.0, torch.ones(10, 1)), r"`mass` should have shape \(10,\)"),
        (
            lambda: diffusion(POINTS, 1.0, torch.ones(3, 10)),
            r"`mass` should broadcast to the shape \(10,\).*got \(3, 10\)",
        ),
        (
            lambda: diffusion(POINTS.expand(2, 10, 3), [1.0, 2.0, 3.0], torch.ones(2, 10)),
            "With heads, masses of a batch need",
        ),
        (lambda: sinkhorn(KERNEL, init=torch.zeros(4)), r"`init` should have shape \(10,\).*got \(4,\)"),
        (lambda: sinkhorn(KERNEL, init=torch.full((10,), torch.nan)), "`init` should be finite"),
        (
            lambda: diffusion(POINTS, 1.0) @ torch.ones(4, 2),
            r"`signal` should have shape \(10,\), \(10, C\).*got \(4, 2\)",
        ),
        (lambda: diffusion(POINTS, 1.0) @ 3.0, r"`signal` should have shape .*got \(\)"),
        (lambda: diffusion(POINTS, 1.0) @ torch.ones(10, device="meta"), "`signal` should be on cpu"),
        (lambda: diffuse(POINTS, 1.0, torch.ones(4)), "`signal` should have shape"),
        (lambda: diffusion(POINTS, 1.0).power(-1, POINTS), "`t` should be 0 or more, and finite; got -1"),
        (lambda: diffusion(POINTS, 1.0).power(1.5, POINTS), r"`t` should be an integer; got 1.5.*qattn.eigsh\(q, k\)"),
        (
            lambda: diffusion(POINTS, 1.0).extend(torch.ones(4, 2)),
            "`points` should have 3 coordinates, as the kernel's own",
        ),
        (lambda: MatrixKernel([[1.0, 2.0], [0.5, 1.0]]), "`similarity` should be symmetric; .* by up to 1.5"),
        (
            lambda: MatrixKernel([[1.0, -2.0], [-2.0, 1.0]]),
            "`similarity` should not be negative; 2 of its 4 entries are",
        ),
        (lambda: MatrixKernel([[1.0, torch.nan], [torch.nan, 1.0]]), "`similarity` should be finite"),
        (lambda: MatrixKernel(torch.ones(2, 3)), r"`similarity` should have shape \(\*batch, N, N\); got \(2, 3\)"),
        (lambda: -1 * KERNEL, "the factor of a kernel should be positive and finite; got -1"),
        (
            lambda: KERNEL + GaussianKernel(POINTS[:4], 1.0),
            r"one size and batches that broadcast; got \(10, 10\), \(4, 4\)",
        ),
        (lambda: ragged.to_padded(POINTS), "Give either `offset`, the end of each cloud, or `batch`"),
        (
            lambda: ragged.to_padded(POINTS, offset=torch.tensor([0, 5])),
            "`offset` should rise to the number of rows, 10",
        ),
        (lambda: ragged.to_padded(POINTS, batch=torch.zeros(4).long()), r"`batch` should be sorted.*got shape \(4,\)"),
        (lambda: ragged.to_padded(POINTS, batch=torch.arange(10).flip(0)), "`batch` should be sorted"),
    ],
)
def test_wrong_input_to_kernels_and_operators(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_wrong_kinds_of_objects():
    with pytest.raises(TypeError, match="`points` should be a tensor or an array of numbers; got str"):
        diffusion("cloud.ply", 1.0)
    with pytest.raises(TypeError, match="unsupported operand"):
        KERNEL + 3
    with pytest.raises(TypeError, match="unsupported operand"):
        KERNEL * KERNEL


def test_what_is_not_wrong():
    """Integers, duplicates, one point, masses that do not sum to one."""
    assert (diffusion(torch.ones(5, 2, dtype=torch.int64), 1) @ torch.arange(5)).isfinite().all()
    assert diffusion([[0.0]], 1.0, [7.0]).converged
    q, is_right = diffusion(POINTS, 1.0), POINTS[:, 0] > 0
    torch.testing.assert_close(q @ is_right, q @ is_right.float(), rtol=0, atol=0)
    np.testing.assert_array_equal(q @ is_right.numpy(), (q @ is_right).numpy())
    array = np.random.default_rng(0).standard_normal((20, 3))[::-2]  # negative strides, and not writable
    array.flags.writeable = False
    assert diffusion(array, 1.0).converged


@pytest.mark.parametrize(
    "shapes",
    [((), (3,)), ((5, 1), (3,)), ((1, 2), (4, 1, 1), ()), ((0,), (1,)), ((2, 3), (2, 3)), ((2,), (3,)), ((0,), (2,))],
)
def test_shapes_broadcast_as_those_of_torch(shapes):
    try:
        expected = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="do not broadcast"):
            broadcast_shapes(*shapes)
    else:
        assert broadcast_shapes(*shapes) == expected


@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_of_either_byte_order_that_may_not_be_written_to(order):
    """Files of other machines and memory maps hold such arrays."""

    def stored(numbers, dtype):
        array = np.asarray(numbers).astype(np.dtype(dtype).newbyteorder(order))
        array.flags.writeable = False
        return array

    generator = np.random.default_rng(0)
    points, mass, signal = generator.standard_normal((20, 3)), generator.random(20), generator.standard_normal(20)
    expected = diffusion(points, [0.5, 1.0], mass) @ signal[:, None]
    q = diffusion(stored(points, "f8"), stored([0.5, 1.0], "f4"), stored(mass, "f8"))
    np.testing.assert_allclose(q @ stored(signal, "f8")[:, None], expected, rtol=1e-12)
    edges = stored([[0, 1], [1, 0]], "i4"), stored([1.0, 1.0], "f4")
    assert GraphKernel(*edges).shape == (2, 2)
    with pytest.raises(TypeError, match="`points` should be a tensor or an array of numbers; got an array of object"):
        diffusion(np.array([[None]]), 1.0)
