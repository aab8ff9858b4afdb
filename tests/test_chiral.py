"""Left and right in QDiffNet: what a mirror does to it, and what a rotation does not."""

import pytest
import torch

from qattn.nn import QDiffNet
from qattn.shapes import creature


def network(chiral):
    torch.manual_seed(0)
    return QDiffNet(2, 5, num_scales=3, features=4, num_blocks=2, sigma=(0.2, 0.8), chiral=chiral, tol=1e-6).double()


@pytest.mark.parametrize("chiral", [False, True])
def test_rotations_and_mirrors(chiral):
    points = creature(200)[0].double()
    inputs = torch.sin(3 * points[:, :2])  # fixed to the points
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]
    rotation = rotation * torch.linalg.det(rotation)
    net = network(chiral)
    out = net(inputs, points)
    torch.testing.assert_close(net(inputs, points @ rotation.T), out, rtol=0, atol=1e-5)
    change = (net(inputs, points @ -rotation.T) - out).detach().abs().max()
    assert change > 1e-3 if chiral else change < 1e-5


def test_chirality_needs_gradients_in_space():
    with pytest.raises(ValueError, match="needs gradients in space"):
        QDiffNet(2, 5, chiral=True, gradient="none")
