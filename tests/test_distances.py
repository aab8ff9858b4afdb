"""The Energy Distance and the Chamfer distance against their formulas, laws and gradients."""

import numpy as np
import pytest
import torch
from cases import dense_energy_distance, pairwise_distances

from qattn.distances import chamfer_distance, energy_distance, sums


def clouds(N=70, M=300, d=2, dtype=torch.float64, batch=()):
    return torch.randn(*batch, N, d, dtype=dtype), 1 + torch.randn(*batch, M, d, dtype=dtype)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 9])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])  # distances are about 1
def test_it_is_what_its_formula_says(d, dtype, tol):
    x, y = clouds(d=d, dtype=dtype)
    a, b = torch.rand(70, dtype=dtype), torch.rand(300, dtype=dtype)
    for masses in ((None, None), (a, b)):
        energy = energy_distance(x, y, *masses)
        assert energy.dtype == dtype
        assert float((energy - dense_energy_distance(x, y, *masses)).abs()) < tol


@pytest.mark.parametrize("d", [2, 5])
def test_gradients_by_points_and_masses_are_those_of_the_formula(d):
    x, y = (z.requires_grad_() for z in clouds(d=d))
    a, b = (torch.rand(n).double().requires_grad_() for n in (70, 300))
    found = torch.autograd.grad(energy_distance(x, y, a, b), (x, y, a, b))
    expected = torch.autograd.grad(dense_energy_distance(x, y, a, b), (x, y, a, b))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    small = [z[..., :6, :].detach().requires_grad_() for z in (x, y)] + [
        m[:6].detach().requires_grad_() for m in (a, b)
    ]
    assert torch.autograd.gradcheck(energy_distance, small)


def test_the_gradient_has_the_sign_that_leads_to_the_target():
    """(1/NM) Σ (x_i − y_j) / ‖·‖ − (1/N²) Σ (x_i − x_j) / ‖·‖: printed in the paper with the opposite sign."""
    x, y = torch.zeros(1, 2, requires_grad=True), torch.tensor([[3.0, 4.0]])
    energy_distance(x, y).backward()
    torch.testing.assert_close(x.grad, torch.tensor([[-0.6, -0.8]]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_plain_sums_are_the_compiled_ones(device, monkeypatch):
    monkeypatch.setattr(sums, "_MAX_PAIRS", 1000)  # several chunks
    x, y = clouds(batch=(3,))
    x[:, :5] = y[:, :5]
    w = torch.randn(3, 300).double()
    plain = sums.chunked_sums(*(z.to(device) for z in (x, y, w)))
    for found, expected in zip(plain, sums.compiled_sums(x, y, w), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)


def test_batches_broadcast():
    x, y = clouds(20, 30, batch=(2, 3))
    a = torch.rand(2, 3, 20).double()
    torch.testing.assert_close(energy_distance(x, y, a), dense_energy_distance(x, y, a))
    torch.testing.assert_close(energy_distance(x, y[0, 0]), dense_energy_distance(x, y[0, 0]))
    each = [[chamfer_distance(p, q) for p, q in zip(*rows, strict=True)] for rows in zip(x, y, strict=True)]
    torch.testing.assert_close(chamfer_distance(x, y), torch.tensor(each).double())


def test_it_is_positive_and_zero_of_a_measure_and_itself():
    x, y = clouds()
    assert energy_distance(x, y) > 0.1
    assert energy_distance(x, x[torch.randperm(70)]).abs() < 1e-14
    near = x + 1e-3 * torch.randn_like(x)
    assert 0 < energy_distance(x, near) < 1e-4
    assert chamfer_distance(x, x.flip(0)) == 0


def test_symmetry_motions_and_scale():
    x, y = clouds(d=3)
    rotation = torch.linalg.qr(torch.randn(3, 3).double())[0]
    for distance, degree in ((energy_distance, 1), (chamfer_distance, 2)):
        expected = distance(x, y)
        torch.testing.assert_close(distance(y, x), expected)
        torch.testing.assert_close(distance(x @ rotation + 5, y @ rotation + 5), expected)
        for scale in (1e-100, 1e100):
            torch.testing.assert_close(distance(scale * x, scale * y) / scale**degree, expected)


def test_masses_count_points():
    """A repeated point is a point with twice the mass; masses have any scale, and a mass of 0 removes a point."""
    x, y = clouds()
    twice, mass = torch.cat([x, x[:1]]), torch.ones(70).double()
    mass[0] = 2
    expected = energy_distance(twice, y)
    torch.testing.assert_close(energy_distance(x, y, mass), expected)
    torch.testing.assert_close(energy_distance(x, y, 100 * mass), expected)
    padded = torch.cat([x, torch.zeros(9, 2).double()])
    torch.testing.assert_close(energy_distance(padded, y, torch.cat([mass, torch.zeros(9).double()])), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [2, 5])
def test_points_in_one_place_have_no_direction(dtype, d):
    x = torch.randn(10, d, dtype=dtype)
    y = torch.cat([x, x[:3]])
    both = [z.clone().requires_grad_() for z in (torch.cat([x, x[:3]]), y)]
    energy_distance(*both).backward()
    assert all(z.grad.isfinite().all() for z in both)
    assert float(both[0].grad.abs().amax()) < 1e-6  # the same measure
    alone = torch.ones(4, d, dtype=dtype, requires_grad=True)
    energy = energy_distance(alone, torch.ones(2, d, dtype=dtype))
    energy.backward()
    assert energy == 0
    assert (alone.grad == 0).all()


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 2.0])
def test_chamfer_gradients_where_points_coincide(power):
    """Coinciding points contribute 0, and do not affect the gradients of other points."""
    x = torch.tensor([[0.0, 0.0], [3.0, 0.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    chamfer_distance(x, y, power).backward()
    # The second point of x is 3 from the first of y; the second of y is 4 from the second of x.
    expected = torch.tensor([[0.0, 0.0], [3.0 ** (power - 1), -(4.0 ** (power - 1))]], dtype=torch.float64)
    torch.testing.assert_close(x.grad, 0.5 * power * expected)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("d", [2, 30])  # by a tree and by products
def test_chamfer_distance(power, d):
    x, y = (z.requires_grad_() for z in clouds(d=d))
    D = pairwise_distances(x, y) ** power
    expected = D.amin(1).mean() + D.amin(0).mean()
    found = chamfer_distance(x, y, power)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, (x, y)), torch.autograd.grad(expected, (x, y)))


def test_arrays_come_back_as_arrays():
    x, y = (z.numpy() for z in clouds(20, 30))
    assert isinstance(energy_distance(x, y), np.ndarray)
    assert isinstance(chamfer_distance(x, y), np.ndarray)
    assert energy_distance(x.astype(np.float32), y).dtype == np.float64


X, Y = torch.ones(4, 2), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: energy_distance(X[0], Y), r"`source` should have shape \(\*batch, N, d\); got \(2,\)"),
        (
            lambda: energy_distance(X, Y[:, :1]),
            r"`target` should have as many coordinates .* \(\*batch, M, 2\); got \(3, 1\)",
        ),
        (lambda: energy_distance(X, Y / 0), "`target` should be finite"),
        (lambda: energy_distance(X.expand(2, 4, 2), Y.expand(3, 3, 2)), "batch axes should broadcast"),
        (lambda: energy_distance(X, Y, X[:, 0] - 2), "`source_mass` should be 0 or more"),
        (lambda: energy_distance(X, Y, None, 0 * Y[:, 0]), "`target_mass` should be .* a positive sum"),
        (lambda: energy_distance(X, Y, None, X[:, 0]), r"`target_mass` should have shape \(3,\).*got \(4,\)"),
        (lambda: energy_distance(X, Y, X[:, 0] / 0), "`source_mass` should be finite"),
        (lambda: chamfer_distance(X, Y, power=0), "`power` should be positive"),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
