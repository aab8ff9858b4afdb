"""`torch.compile` of code that attends: the same numbers, forward and backward."""

import pytest
import torch

from qattn import attend, diffusion


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch speaks of its graph breaks
def test_compiled_code_gives_the_same_result_and_gradient():
    points = torch.randn(100, 3, requires_grad=True)

    def loss(points):
        out, lse = attend(2 * points, 2 * points, points)
        return (out**2).sum() + lse.sum()

    (expected,) = torch.autograd.grad(loss(points), points)
    (got,) = torch.autograd.grad(torch.compile(loss)(points), points)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_code_that_normalizes():
    points = torch.randn(60, 3, requires_grad=True)

    def loss(points):
        return (diffusion(points, 0.5) @ points.square()).sum()

    (expected,) = torch.autograd.grad(loss(points), points)
    (got,) = torch.autograd.grad(torch.compile(loss)(points), points)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
