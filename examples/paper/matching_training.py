"""Training of the networks for matching: Adam with a cosine schedule, and checkpoints; see examples/resumable.py."""

from functools import partial

import torch
from matching_losses import LOSSES, losses, maps, soft_maps
from resumable import Budget, Clock, Resumable, cosine

__all__ = ["Budget", "Clock", "Training"]

LAST = 0.1  # of the rate, at the end of the schedule


class Training(Resumable):
    """Training of a network without labels, by the losses of functional maps between pairs of shapes.

    Args:
        network: Module from a batch to features (B, N, C).
        sampler: Source of batches.
        rate: Learning rate at the start.
        num_pairs: Number of pairs of shapes in a step.
        seed: Seed of the pairs, samples and rotations.
        path: File of the checkpoint. If it exists, training goes on from there.
        settings: Numbers and names that have to be those of the checkpoint.
    """

    def __init__(self, network, sampler, rate, num_pairs, seed, path, settings=None):
        self.sampler, self.num_pairs = sampler, num_pairs
        optimizer = torch.optim.Adam(network.parameters(), rate)
        super().__init__(network, optimizer, partial(_rate, rate), LOSSES, seed, path, settings)

    def losses(self):
        clock = self.clock
        with clock.part("samples"):
            batch = self.sampler.draw(self.num_pairs, self.generator)
        with clock.part("features"):
            features = self.network(batch)
        with clock.part("maps"):
            features, vectors, projections, frequencies = (
                x.unflatten(0, (2, -1)) for x in (features, batch.vectors, batch.projections, batch.frequencies)
            )
            C = maps(features, projections, frequencies)
        with clock.part("losses"):
            return losses(C, soft_maps(features, vectors, projections))


def _rate(first, done):
    return first * cosine(done, LAST)
