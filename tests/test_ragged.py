"""Clouds of different sizes: packed, padded and back, with the results of each cloud alone."""

import torch

from qattn import diffusion
from qattn.ragged import to_packed, to_padded

OFFSET = torch.tensor([5, 5, 30, 42])  # the second cloud is empty
BATCH = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 0, 25, 12]))


def test_there_and_back():
    for packed in (torch.randn(42, 3), torch.randn(42), torch.randn(42, 2, 2)):
        padded, present = to_padded(packed, offset=OFFSET)
        assert padded.shape == (4, 25, *packed.shape[1:])
        assert present.sum(1).tolist() == [5, 0, 25, 12]
        assert (padded[~present] == 0).all()
        torch.testing.assert_close(to_packed(padded, present), packed, rtol=0, atol=0)


def test_offset_and_batch_agree():
    packed = torch.randn(42, 3)
    for a, b in zip(to_padded(packed, offset=OFFSET), to_padded(packed, batch=BATCH), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_gradients_go_through():
    packed = torch.randn(42, 3, requires_grad=True)
    padded, present = to_padded(packed, offset=OFFSET)
    (grad,) = torch.autograd.grad(to_packed(padded, present).square().sum(), packed)
    torch.testing.assert_close(grad, 2 * packed)


def test_padded_diffusion_is_the_diffusion_of_each_cloud():
    offset = torch.tensor([5, 30, 42])
    points, signal = torch.randn(42, 3), torch.randn(42, 2)
    padded, present = to_padded(points, offset=offset)
    signals, _ = to_padded(signal, offset=offset)
    mass = present / present.sum(1, keepdim=True)
    together = to_packed(diffusion(padded, 0.5, mass, tol=1e-5) @ signals, present)
    for cloud in torch.tensor_split(torch.arange(42), offset[:-1]):
        alone = diffusion(points[cloud], 0.5, tol=1e-5) @ signal[cloud]
        torch.testing.assert_close(together[cloud], alone, rtol=0, atol=1e-5)
