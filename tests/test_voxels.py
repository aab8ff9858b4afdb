"""Voxels: the dense matrix they stand for, on solids, sparse sets and shells; the laws, and what is refused."""

import copy
import pickle
import re
from functools import partial

import numpy as np
import pytest
import torch
from cases import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import added_megabytes
from torch.autograd import gradcheck, gradgradcheck

import qattn
from qattn import GaussianKernel, check_axioms, diffusion, sinkhorn
from qattn.kernels import voxel_blocks as blocks

pytestmark = pytest.mark.usefixtures("_one_thread")

VoxelKernel = partial(qattn.VoxelKernel, method="blocks")


EXACT = 1e-13  # a tolerance below which nothing is left to see in float64


def random_mask(*shape, density=0.3, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < density


def islands():
    """Three pieces in a grid of many blocks, most of them empty."""
    mask = torch.zeros(70, 45, 90, dtype=torch.bool)
    mask[:3, :4, :5] = True
    mask[30:34, 20, 40:60] = random_mask(4, 20, density=0.5)
    mask[60:70, 40:45, 85:90] = random_mask(10, 5, 5, density=0.2)
    return mask


MASKS = {
    "line": random_mask(100),
    "plane": random_mask(40, 23),
    "box": random_mask(12, 20, 17, density=0.2),
    "solid": torch.ones(9, 8, 10, dtype=torch.bool),
    "islands": islands(),
    "one voxel": torch.ones(1, 1, 1, dtype=torch.bool),
}


def dense(kernel):
    """The matrix of the kernel in float64, from its places in the grid, with nothing of the library."""
    points = kernel.index.double() * torch.tensor(kernel.spacing, dtype=torch.float64)
    gaps = ((points[:, None] - points[None]) ** 2).sum(-1)
    return torch.exp(-gaps / (2 * float(kernel.sigma) ** 2))


def check(kernel, matrix, tolerance=1e-11, spread=1.0):
    N = len(matrix)
    assert kernel.shape == (N, N)
    for batch in ((), (2, 3)):
        bias = spread * torch.randn(*batch, N, dtype=torch.float64)
        value = torch.randn(*batch, N, 3, dtype=torch.float64)
        weights = matrix * torch.exp(bias)[..., None, :]
        out, lse = kernel.attend(bias.to(kernel.dtype), value.to(kernel.dtype))
        assert out.dtype == lse.dtype == kernel.dtype
        torch.testing.assert_close(lse.double(), torch.log(weights.sum(-1)), rtol=0, atol=tolerance)
        expected = weights @ value / weights.sum(-1, keepdim=True)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=4 * tolerance)
        torch.testing.assert_close(kernel.attend(bias.to(kernel.dtype)).lse, lse, rtol=0, atol=0)


@pytest.mark.parametrize("sigma", [slow(0.1), 0.6, slow(2.0), slow(7.0), 1000.0])
@pytest.mark.parametrize("name", MASKS)
def test_voxels_are_their_matrix(name, sigma):
    """The reach goes from no voxel to the whole grid."""
    kernel = VoxelKernel(MASKS[name].double(), sigma, tol=EXACT)
    check(kernel, dense(kernel))


@pytest.mark.parametrize("sigma", [slow(0.1), slow(0.6), 2.0, slow(7.0), slow(1000.0)])
@pytest.mark.parametrize("name", MASKS)
def test_single_precision_is_within_the_tolerance(name, sigma):
    kernel = VoxelKernel(MASKS[name], sigma)
    assert kernel.dtype == torch.float32
    check(kernel, dense(kernel), tolerance=1e-3)
    assert float(kernel.error()) < 1e-3


def test_the_tolerance_holds_and_is_used():
    """One voxel outweighs all others by e^20: what it adds to rows beyond its reach is what is left out."""
    mask = torch.ones(30, dtype=torch.float64)
    bias = torch.full((30,), -20.0, dtype=torch.float64)
    bias[-1] = 0
    for tol in (1e-2, 1e-4, 1e-6):
        kernel = VoxelKernel(mask, 2.0, tol=tol)
        exact = torch.log((dense(kernel) * bias.exp()).sum(-1))
        error = float((kernel.attend(bias).lse - exact).abs().max())
        assert 0 < error < tol


@pytest.mark.parametrize("name", ["plane", "box", "islands"])
def test_anisotropic_voxels(name):
    spacing = [0.5, 2.0, 0.1][: MASKS[name].ndim]
    kernel = VoxelKernel(MASKS[name].double(), 1.1, spacing, tol=EXACT)
    assert kernel.spacing == tuple(spacing)
    torch.testing.assert_close(kernel.points, kernel.index * torch.tensor(spacing).double())
    check(kernel, dense(kernel))
    torch.testing.assert_close(
        kernel.exact_lse(torch.arange(5), torch.zeros(kernel.shape[0])), dense(kernel).sum(-1).log()[:5]
    )


@pytest.mark.parametrize("size", [8, 16, slow(32), slow(64)])
def test_every_size_of_blocks(size, monkeypatch):
    monkeypatch.setattr(blocks, "_SIZES", (size,))
    for name in ("line", "plane", "islands"):
        kernel = VoxelKernel(MASKS[name].double(), 4.0, tol=EXACT)
        assert f"blocks of {size}" in str(kernel)
        check(kernel, dense(kernel))


def test_groups_of_columns_and_chunks_of_blocks(monkeypatch):
    """All loops go round more than once if hardly any memory is allowed."""
    monkeypatch.setattr(blocks, "_GROUP", 1)
    monkeypatch.setattr(blocks, "_CHUNK", 1)
    kernel = VoxelKernel(MASKS["islands"].double(), 3.0, tol=EXACT)
    check(kernel, dense(kernel))
    assert kernel.attend(torch.zeros(kernel.shape[0]), torch.zeros(kernel.shape[0], 0)).out.shape[-1] == 0


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    density=st.floats(0.001, 1),
    sigma=st.floats(0.05, 50),
    seed=st.integers(0, 2**31),
)
def test_any_voxels_are_their_matrix(shape, density, sigma, seed):
    mask = random_mask(*shape, density=density, seed=seed)
    mask.view(-1)[seed % mask.numel()] = True
    chosen = mask.reshape(-1).nonzero()[:300, 0]
    mask = torch.zeros(mask.numel(), dtype=torch.float64).index_fill(0, chosen, 1).reshape(shape)
    kernel = VoxelKernel(mask, sigma, tol=EXACT)
    check(kernel, dense(kernel), spread=5.0)


def test_agrees_with_the_gaussian_kernel_of_the_centers():
    kernel = VoxelKernel(MASKS["islands"], 0.4, [0.1, 0.2, 0.15])
    points = GaussianKernel(kernel.points, 0.4)
    bias, value = torch.randn(kernel.shape[0]), torch.randn(kernel.shape[0], 4)
    for ours, theirs in zip(kernel.attend(bias, value), points.attend(bias, value), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)
    torch.testing.assert_close(
        diffusion(kernel, tol=1e-5) @ value, diffusion(points, tol=1e-5) @ value, rtol=0, atol=1e-3
    )


def test_a_sum_and_a_multiple():
    a, b = (VoxelKernel(MASKS["box"].double(), s, tol=EXACT) for s in (1.0, 3.0))
    check(a + 2 * b, dense(a) + 2 * dense(b))


FORMS = {
    "mask": lambda w: w > 0,
    "array of bool": lambda w: (w > 0).numpy(),
    "integers": lambda w: (w > 0).int(),
    "weights": lambda w: w,
    "array": lambda w: w.numpy(),
    "read-only array": lambda w: np.broadcast_to(w.numpy(), w.shape),
    "half": lambda w: w.half(),
    "sparse": lambda w: w.to_sparse_coo(),
    "sparse mask": lambda w: (w > 0).to_sparse_coo(),
    "sparse, repeated": lambda w: torch.sparse_coo_tensor(
        torch.cat([w.nonzero(), w.nonzero()]).T, 0.5 * w[w > 0].repeat(2), w.shape, check_invariants=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    weights = torch.rand(6, 20, 9) * MASKS["box"][:6, :, :9]
    kernel = VoxelKernel(FORMS[form](weights), 1.5)
    torch.testing.assert_close(kernel.index, (weights > 0).nonzero())
    expected = VoxelKernel(weights, 1.5)
    bias = torch.randn(kernel.shape[0])
    torch.testing.assert_close(kernel.attend(bias).lse, expected.attend(bias).lse, rtol=0, atol=0)
    if "mask" in form or "bool" in form:
        assert kernel.mass is None
    else:
        mass = FORMS["integers"](weights) if form == "integers" else weights
        mass = mass[weights > 0] / mass.sum()
        torch.testing.assert_close(kernel.mass, mass, rtol=1e-3 if form == "half" else 1e-5, atol=0)
        torch.testing.assert_close(diffusion(kernel).mass, kernel.mass)


def test_copies():
    kernel = VoxelKernel(MASKS["islands"] * torch.rand(70, 45, 90).double(), 2.0, tol=EXACT)
    matrix = dense(kernel)
    kernel.attend(torch.zeros(len(matrix)).double())  # tables are prepared now
    for same in (pickle.loads(pickle.dumps(kernel)), copy.deepcopy(kernel), kernel.replace(*kernel.tensors)):
        check(same, matrix)
        torch.testing.assert_close(same.mass, kernel.mass)
    q = diffusion(kernel).to(torch.float32)
    assert q.kernel.dtype == torch.float32
    check(q.kernel, matrix, tolerance=1e-4)


def test_signals_on_the_grid():
    mask = MASKS["plane"]
    kernel = VoxelKernel(mask, 1.0)
    grid = torch.randn(40, 23, 2, requires_grad=True)
    signal = kernel.from_grid(grid)
    torch.testing.assert_close(signal, grid[mask])
    back = kernel.to_grid(signal, fill=-7.0)
    torch.testing.assert_close(back, torch.where(mask[..., None], grid, -7.0))
    back.sum().backward()
    torch.testing.assert_close(grid.grad, mask[..., None].expand(-1, -1, 2).float())
    assert isinstance(kernel.from_grid(grid.detach().numpy()), np.ndarray)
    whole = kernel.to_grid(signal[:, 0].detach().numpy())
    assert isinstance(whole, np.ndarray)
    assert whole.shape == (40, 23)
    assert not whole[~mask.numpy()].any()


@pytest.mark.parametrize("name", ["line", "plane", slow("box"), slow("islands")])
def test_laws(name):
    weights = MASKS[name] * (torch.rand(MASKS[name].shape, dtype=torch.float64) + 0.1)
    kernel = VoxelKernel(weights, 2.0, tol=EXACT)
    N, mass = kernel.shape[0], kernel.mass
    q = {
        n: diffusion(kernel, normalization=n, tol=1e-11, solver=qattn.Solver(max_iter=200))
        for n in ("sinkhorn", "row", "symmetric", "none")
    }
    Q = {n: operator.to_dense() for n, operator in q.items()}
    ones = torch.ones(N, dtype=torch.float64)
    for n in ("sinkhorn", "row"):
        torch.testing.assert_close(Q[n] @ ones, ones, rtol=0, atol=1e-9)
    for n in ("sinkhorn", "symmetric", "none"):
        torch.testing.assert_close(mass[:, None] * Q[n], (mass[:, None] * Q[n]).T, rtol=0, atol=1e-12)
    root = mass.sqrt()
    for n in ("sinkhorn", "symmetric"):
        spectrum = torch.linalg.eigvalsh(root[:, None] * Q[n] / root)
        assert spectrum.min() > -1e-9
        assert spectrum.max() < 1 + 1e-9
    assert all((matrix >= 0).all() for matrix in Q.values())
    torch.testing.assert_close(mass @ Q["sinkhorn"], mass, rtol=0, atol=1e-10)
    torch.testing.assert_close(q["sinkhorn"].T @ ones, Q["sinkhorn"].T @ ones, rtol=0, atol=1e-9)


def test_the_axioms_at_the_default_tolerance():
    assert check_axioms(diffusion(VoxelKernel(MASKS["islands"], 1.5))).holds
    assert check_axioms(diffusion(VoxelKernel(torch.rand(15, 15, 15), 1.5))).holds


def test_flips_transpositions_and_units():
    weights = MASKS["box"] * torch.rand(12, 20, 17, dtype=torch.float64)
    spacing = (0.5, 1.0, 0.7)
    signal = torch.randn(12, 20, 17, dtype=torch.float64)

    def smoothed(weights, signal, spacing, sigma):
        kernel = VoxelKernel(weights, sigma, spacing)
        return kernel.to_grid(diffusion(kernel, tol=1e-8) @ kernel.from_grid(signal))

    result = smoothed(weights, signal, spacing, 1.2)
    flipped = smoothed(weights.flip(0, 2), signal.flip(0, 2), spacing, 1.2)
    torch.testing.assert_close(flipped.flip(0, 2), result, rtol=0, atol=1e-12)
    turned = smoothed(weights.permute(2, 0, 1), signal.permute(2, 0, 1), (0.7, 0.5, 1.0), 1.2)
    torch.testing.assert_close(turned.permute(1, 2, 0), result, rtol=0, atol=1e-12)
    scaled = smoothed(weights, signal, [1e-3 * h for h in spacing], 1.2e-3)
    torch.testing.assert_close(scaled, result, rtol=0, atol=1e-12)
    padded = smoothed(*(torch.nn.functional.pad(x, (5, 3, 100, 1, 9, 9)) for x in (weights, signal)), spacing, 1.2)
    torch.testing.assert_close(padded[9:-9, 100:-1, 5:-3], result, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_masses_over_twelve_decades(dtype):
    mask = MASKS["islands"]
    weights = (10 ** (-12 * torch.rand(mask.shape, dtype=torch.float64)) * mask).to(dtype)
    kernel = VoxelKernel(weights, 2.0)
    q = diffusion(kernel, tol=1e-6)
    matrix = dense(kernel)
    f = q.potential.double()
    rows = torch.exp(f + torch.log(matrix @ (kernel.mass.double() * f.exp())))
    assert float((kernel.mass.double() * (rows - 1).abs()).sum()) < 1e-4
    bias = kernel.mass.log()
    exact = torch.log((matrix * bias.double().exp()).sum(-1))
    torch.testing.assert_close(kernel.attend(bias).lse.double(), exact, rtol=0, atol=1e-3)
    ones = torch.ones(kernel.shape[0], dtype=dtype)
    torch.testing.assert_close(q.T @ kernel.mass, kernel.mass, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close((q @ ones).double(), rows, rtol=0, atol=2e-3)


@pytest.mark.parametrize("span", [70.0, 600.0])
def test_biases_beyond_single_precision(span):
    kernel = VoxelKernel(MASKS["line"], 3.0)
    bias = torch.linspace(-span / 2, span / 2, kernel.shape[0])
    exact = torch.logsumexp(torch.log(dense(kernel)) + bias.double(), dim=-1)
    torch.testing.assert_close(kernel.attend(bias).lse.double(), exact, rtol=0, atol=1e-3)
    with pytest.raises(
        ValueError, match=r"within 650 nats of one another; got 1200\. Give the lightest of them mass 0"
    ):
        kernel.attend(bias * 1200 / span)


def test_absent_voxels():
    """Far from all mass, at any distance, a voxel without mass has a finite lse, and the normalization no NaN."""
    mask = torch.zeros(400, 3)
    mask[:5], mask[30], mask[200, 1], mask[399, 0] = 1, 1, 1, 1
    kernel = VoxelKernel(mask.double(), 1.0)
    N = kernel.shape[0]
    mass = (kernel.index[:, 0] < 5).double()
    points = kernel.points
    exact = torch.logsumexp(-0.5 * torch.cdist(points, points) ** 2 + torch.log(mass), dim=-1)
    value = torch.randn(N, 2, dtype=torch.float64)
    for bias in (torch.log(mass), torch.log(mass).expand(2, N)):
        out, lse = kernel.attend(bias, value)
        torch.testing.assert_close(lse, exact.expand(lse.shape), rtol=1e-9, atol=2e-3)
        assert out.isfinite().all()
    q = diffusion(kernel, mass=mass)
    assert q.converged
    assert q.potential.isfinite().all()
    torch.testing.assert_close((q @ torch.ones(N, dtype=torch.float64))[mass > 0], mass[mass > 0], rtol=0, atol=1e-2)
    nothing = torch.full((2, N), -torch.inf, dtype=torch.float64)
    nothing[0] = 0
    out, lse = kernel.attend(nothing, value)
    assert (lse[1] == -torch.inf).all()
    assert (out[1] == 0).all()
    torch.testing.assert_close(lse[0], kernel.attend(nothing[0]).lse, rtol=0, atol=0)


def test_signals_with_a_batch_axis():
    kernel = VoxelKernel(MASKS["box"].double(), 1.5)
    signal = torch.randn(3, kernel.shape[0], 2, dtype=torch.float64)
    q = diffusion(kernel, tol=1e-8)
    torch.testing.assert_close(q @ signal, torch.stack([q @ s for s in signal]), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_gradients():
    mask = random_mask(3, 9, 2, density=0.12).double()
    N = int(mask.sum())
    bias, value = torch.randn(2, N, dtype=torch.float64), torch.randn(N, 2, dtype=torch.float64)
    sigma = torch.tensor(1.3, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (bias, value, sigma)]

    def function(bias, value, sigma):
        return VoxelKernel(mask, sigma, [1.0, 0.5, 2.0], tol=EXACT).attend(bias, value)

    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@pytest.mark.slow
def test_gradients_through_the_normalization():
    weights = random_mask(5, 12, density=0.12).double() * (torch.rand(5, 12, dtype=torch.float64) + 0.5)
    sigma = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    signal = torch.randn(int((weights > 0).sum()), 2, dtype=torch.float64, requires_grad=True)
    inside = weights[weights > 0].requires_grad_()
    places = (weights > 0).nonzero().T

    def smoothed(inside, sigma, signal):
        grid = torch.zeros(5, 12, dtype=torch.float64).index_put(tuple(places), inside)
        return diffusion(VoxelKernel(grid, sigma, tol=EXACT), tol=1e-13, solver=qattn.Solver(max_iter=200)) @ signal

    def potential(inside, sigma):
        grid = torch.sparse_coo_tensor(places, inside, (5, 12), check_invariants=True)
        return sinkhorn(VoxelKernel(grid, sigma, tol=EXACT), tol=1e-13, solver=qattn.Solver(max_iter=200)).potential

    assert gradcheck(smoothed, (inside, sigma, signal))
    assert gradcheck(potential, (inside, sigma))
    assert gradgradcheck(potential, (inside, sigma))


def test_gradients_where_a_voxel_is_absent():
    kernel = VoxelKernel(MASKS["line"].double(), 1.0)
    bias = torch.zeros(kernel.shape[0], dtype=torch.float64)
    bias[10:] = -torch.inf
    bias.requires_grad_()
    out, lse = kernel.attend(bias, torch.ones(kernel.shape[0], 1, dtype=torch.float64))
    (lse.sum() + out.sum()).backward()
    assert bias.grad.isfinite().all()
    assert (bias.grad[10:] == 0).all()


def test_no_graph_is_kept_without_gradients():
    kernel = VoxelKernel(MASKS["box"], 1.0)
    assert not kernel.attend(torch.zeros(kernel.shape[0])).lse.requires_grad


FEW_IN_A_LARGE_BOX = """
def step(side, count):
    index = torch.randint(side, (3, count), generator=torch.Generator().manual_seed(0))
    mask = torch.sparse_coo_tensor(index, torch.ones(count, dtype=torch.bool), (side,) * 3, check_invariants=True)
    kernel = qattn.VoxelKernel(mask, 1.5)
    smooth, q = qattn.diffuse(kernel, None, torch.rand(kernel.shape[0], 4))
    assert smooth.isfinite().all() and q.kernel_error(num_rows=16) < 1e-3
"""


@pytest.mark.slow
def test_few_voxels_in_a_large_box_never_make_the_box():
    """3,000 voxels of a box of 1024³, which would take a gigabyte even as a mask."""
    assert added_megabytes(FEW_IN_A_LARGE_BOX, "step(64, 100)", "step(1024, 3000)") < 200


def test_a_shell_needs_the_blocks_of_its_surface():
    side = 128
    x = torch.arange(side) - (side - 1) / 2
    radius = (x[:, None, None] ** 2 + x[:, None] ** 2 + x**2).sqrt()
    kernel = VoxelKernel(((radius - 60).abs() < 0.5).to_sparse_coo(), 1.0)
    assert int(re.search(r"(\d+) blocks of 8 × 8 × 8", str(kernel))[1]) < 0.25 * (side / 8) ** 3
    assert float(kernel.error()) < 1e-3


def test_too_large_a_bandwidth_for_few_voxels_is_refused():
    index = torch.randint(1024, (3, 3000))
    mask = torch.sparse_coo_tensor(index, torch.ones(3000), (1024,) * 3, check_invariants=True)
    kernel = VoxelKernel(mask, 200.0)
    with pytest.raises(ValueError, match=r"3000 voxels would need .* numbers.* Use `GaussianKernel\(kernel\.points"):
        kernel.attend(torch.zeros(3000))
    line = VoxelKernel(torch.ones(1_000_000, dtype=torch.bool), 1e5)
    with pytest.raises(ValueError, match="1000000 voxels would need"):
        line.attend(torch.zeros(1_000_000))


def test_what_a_kernel_prints():
    kernel = VoxelKernel(torch.ones(20, 8, 8), 0.05, 0.02)
    assert repr(kernel) == "VoxelKernel(1280 of 20 × 8 × 8 voxels, sigma=0.05, spacing=0.02, method='blocks')"
    assert str(kernel) == f"{kernel!r}\n  3 blocks of 8 × 8 × 8 voxels, reach 12 × 7 × 7"
    padded = VoxelKernel(torch.nn.functional.pad(torch.ones(20, 8, 8), (4, 0, 4, 0, 4, 0)), 0.05, 0.02)
    assert str(padded).endswith("3 blocks of 8 × 8 × 8 voxels, reach 12 × 7 × 7")  # they begin with the shape
    assert repr(VoxelKernel(torch.ones(3, 4), 1, [1, 2])).endswith("sigma=1, spacing=(1, 2), method='blocks')")


ONES = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 4),), r"at least one occupied voxel; all of shape \(3, 4\) are empty"),
        ((torch.zeros(3, 4, dtype=torch.bool).to_sparse_coo(),), "at least one occupied voxel"),
        ((torch.zeros(0, 4),), "at least one occupied voxel"),
        ((-ONES,), r"should not be negative; 12 of its 12 weights are.* the mask `distance < 0`"),
        ((ONES * np.nan,), "`mask_or_weights` should be finite; 12 of its 12 .* Set them to 0"),
        ((torch.tensor(1.0),), r"a grid with 1, 2 or 3 axes; got shape \(\)"),
        ((torch.ones(2, 2, 2, 2),), r"got shape \(2, 2, 2, 2\)\. Make a kernel for each grid of a batch"),
        ((torch.ones(2, 2, 2).to_sparse(2),), "should be sparse along all its axes; 1 of them are dense"),
        ((torch.ones(2, dtype=torch.complex64),), "should be real numbers; got complex64"),
        ((ONES, 0.0), "`sigma` should be positive and finite; got 0.0"),
        ((ONES, np.inf), "`sigma` should be positive and finite"),
        ((ONES, [1.0, 2.0]), r"`sigma` should be one number; got shape \(2,\)\. Make one kernel per bandwidth"),
        ((ONES, 1.0, 0.0), "`spacing` should be positive and finite; got 0.0"),
        ((ONES, 1.0, [1.0, -1.0]), "`spacing` should be positive and finite"),
        ((ONES, 1.0, [1.0, 1.0, 1.0]), r"one for each of the 2 axes of the grid; got shape \(3,\)"),
    ],
)  # fmt: skip
def test_wrong_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        VoxelKernel(*(arguments if len(arguments) > 1 else (*arguments, 1.0)))


def test_wrong_tolerance_grids_and_signals():
    with pytest.raises(ValueError, match="`tol` should be positive"):
        VoxelKernel(ONES, 1.0, tol=0)
    with pytest.raises(TypeError, match="`mask_or_weights` should be a tensor or an array of numbers; got str"):
        VoxelKernel("ball", 1.0)
    kernel = VoxelKernel(ONES, 1.0)
    with pytest.raises(ValueError, match=r"`grid` should have shape \(3, 4, …\).* got \(4, 3\)"):
        kernel.from_grid(ONES.T)
    with pytest.raises(ValueError, match=r"`signal` should have shape \(12,\), \(12, C\)"):
        kernel.to_grid(torch.ones(3))
    with pytest.raises(ValueError, match=r"`signal` should have shape \(N,\) or \(N, C\); got \(2, 12, 1\)"):
        kernel.to_grid(torch.ones(2, 12, 1))
    large = VoxelKernel(torch.sparse_coo_tensor([[5], [6], [7]], [1.0], (1024,) * 3, check_invariants=True), 1.0)
    with pytest.raises(ValueError, match=r"`to_grid` would make a grid of shape \(1024, 1024, 1024\), 4\.0 GB"):
        large.to_grid(torch.ones(1))
    with pytest.raises(ValueError, match="is not a function of points"):
        diffusion(kernel).extend(torch.zeros(1, 2))


# --- by points


@pytest.mark.parametrize("name", MASKS)
def test_points_are_the_same_kernel(name):
    by_blocks, by_points = (
        qattn.VoxelKernel(MASKS[name].double(), 1.5, method=m, tol=1e-9) for m in ("blocks", "points")
    )
    N = by_points.shape[0]
    bias, value = torch.randn(N).double(), torch.randn(N, 2).double()
    for kernel in (by_points, by_points.replace(*by_points.tensors), pickle.loads(pickle.dumps(by_points))):
        torch.testing.assert_close(tuple(kernel.attend(bias, value)), tuple(by_blocks.attend(bias, value)))
        torch.testing.assert_close(kernel.mass, by_blocks.mass)


def test_shells_go_by_points_and_solids_by_blocks():
    centers = torch.cartesian_prod(*3 * [torch.arange(40) - 19.5]).reshape(40, 40, 40, 3).norm(dim=-1)
    shell, solid = qattn.VoxelKernel((centers - 19).abs() < 0.5, 2.0), qattn.VoxelKernel(centers < 19, 2.0)
    assert (shell.method, solid.method) == ("points", "blocks")
    assert "GaussianKernel" in str(shell)
    assert float(shell.error()) < 1e-3


@pytest.mark.slow
def test_sigma_has_gradients_by_points():
    sigma = torch.tensor(1.5).double().requires_grad_()

    def lse(sigma):
        kernel = qattn.VoxelKernel(MASKS["plane"].double(), sigma, method="points")
        return sinkhorn(kernel, tol=1e-11).potential[:5]

    assert gradcheck(lse, (sigma,), rtol=1e-3, atol=1e-5)
