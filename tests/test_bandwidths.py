"""Bandwidths that suit a cloud, against all distances and the dense operator."""

import numpy as np
import pytest
import torch
from cases import sphere

import qattn
from qattn import diffusion
from qattn.bandwidths import num_neighbors, sigma_range, spacing


@pytest.mark.parametrize("N", [300, 2500])
def test_spacing_is_the_mean_distance_to_the_nearest(N):
    x = sphere(N)
    distances = torch.cdist(x, x).fill_diagonal_(torch.inf)
    assert spacing(x) == pytest.approx(float(distances.amin(1).mean()), rel=1e-6)
    assert spacing(torch.cat([x, x])) == pytest.approx(spacing(x))  # copies are no neighbors
    assert spacing(3 * x.numpy()) == pytest.approx(3 * spacing(x))


def test_suggested_bandwidths():
    x = sphere(1000)
    low, high = sigma_range(x)
    assert low == pytest.approx(2 * spacing(x))
    assert high == pytest.approx(0.1 * float((x.amax(0) - x.amin(0)).norm()))
    coarse = torch.tensor([[0.0], [1.0]])
    assert sigma_range(coarse) == (2.0, 2.0)
    with pytest.raises(ValueError, match="two distinct points"):
        sigma_range(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="one cloud"):
        spacing(torch.zeros(2, 3, 2))


@pytest.mark.parametrize("normalization", ["sinkhorn", "row", "symmetric"])
def test_neighbors_are_those_of_the_dense_operator(normalization):
    x, mass = sphere(200), 10.0 ** (-3 * torch.rand(200)).double()
    mass[:5] = 0
    q = diffusion(x, 0.3, mass, normalization=normalization, tol=1e-9, solver=qattn.Solver(max_iter=200))
    found = num_neighbors(q)
    assert torch.allclose(found[5:], 1 / q.to_dense().diagonal()[5:])
    assert found[:5].isinf().all()


def test_a_tiny_bandwidth_leaves_each_point_alone():
    x = sphere(500).numpy()
    alone, many = (num_neighbors(diffusion(x, sigma)) for sigma in (1e-4, 0.3))
    assert isinstance(alone, np.ndarray)
    assert np.allclose(alone, 1)
    assert many.min() > 5
    with pytest.raises(ValueError, match="needs a `GaussianKernel`"):
        num_neighbors(diffusion(qattn.MatrixKernel(torch.eye(3))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_points_of_16_bits(dtype):
    points = sphere(300).to(dtype)
    assert spacing(points) == spacing(points.double())
    assert sigma_range(points) == sigma_range(points.double())
