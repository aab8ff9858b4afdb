"""Seconds of a training step by part."""

import tempfile
from pathlib import Path

import torch
from matching_networks import QNetwork
from matching_training import Budget, Clock, Training

STEPS = 5


def profile(network, sampler, options):
    """Mean seconds by part of a step, of a few steps after a first one; those of Q-DiffNet's forward pass apart."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(network, sampler, options.rate, options.pairs, options.seed, Path(folder) / "profile.pt")
        training.run(Budget(steps=1), torch.inf)
        training.clock = Clock()
        training.run(Budget(steps=1 + STEPS), torch.inf)
    seconds = {part: total / STEPS for part, total in training.clock.seconds.items()}
    seconds["sum"] = sum(seconds.values())
    if isinstance(network, QNetwork):
        parts = _forward(network.network, sampler, options)
        seconds |= {f"of features: {part}": total for part, total in parts.items()}
    for part, value in seconds.items():
        print(f"{type(network).__name__:16} {part:24} {value:8.3f} s")
    return seconds


@torch.no_grad()
def _forward(network, sampler, options):
    """Seconds of normalization, application and gradients in the blocks of a Q-DiffNet, on one batch."""
    clock, q = Clock(), None
    batch = sampler.draw(options.pairs, torch.Generator().manual_seed(options.seed))
    for block in network.blocks:
        diffusion = block.diffusion
        signal = torch.randn(len(batch.points), diffusion.num_scales, batch.points.shape[1], _channels(network))
        with clock.part("normalize"):
            q = diffusion.operator(batch.points, batch.mass, warm_start=q)
        with clock.part("apply"):
            diffused = q.power(diffusion.num_applications, signal).movedim(1, 2).flatten(2)
        with clock.part("gradients"):
            for matrices in batch.gradients:
                for matrix, features in zip(matrices, diffused, strict=True):
                    matrix @ features
    return clock.seconds


def _channels(network):
    return network.first.out_features // network.blocks[0].diffusion.num_scales
