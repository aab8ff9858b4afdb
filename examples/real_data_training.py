"""Training of a network to label points, and its scores on samples of any kind."""

import time
import zlib
from functools import partial

import torch
from real_data_samples import Batch, Sample, rotations
from real_data_sets import SAMPLINGS
from resumable import Resumable, cosine
from torch.nn.functional import cross_entropy

MEASURED = 3  # batches whose steps are timed
LAST, WARM = 0.02, 0.05  # of the rate at the end; fraction of the budget in which it grows
DECAY = 1e-2


class Training(Resumable):
    """AdamW on the cross-entropy of labels, among those of the kind of each object.

    Args:
        network: Module from a `Batch` to scores (B, N, K).
        sampler: Source of batches.
        rate: Largest learning rate.
        seed: Seed of the batches.
        path: File of the checkpoint. If it exists, training goes on from there.
    """

    def __init__(self, network, sampler, rate, seed, path):
        self.sampler = sampler
        optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=DECAY)
        super().__init__(network, optimizer, partial(_rate, rate), ("cross-entropy",), seed, path)

    def losses(self):
        with self.clock.part("samples"):
            batch = self.sampler.draw(self.generator)
        with self.clock.part("forward"):
            return loss(self.network(batch), batch)[None]


def loss(scores, batch):
    """Cross-entropy of labels for scores (B, N, K), of which those of other kinds do not count."""
    scores = torch.where(batch.is_possible[:, None], scores, -torch.inf)
    return cross_entropy(scores.flatten(0, 1), batch.labels.flatten(), ignore_index=-1)


def _rate(largest, done):
    return largest * cosine(done, LAST, WARM)


def step_seconds(network, sampler):
    """Seconds of a step: the mean over some batches of a first and a second step, after one that does not count."""
    generator = torch.Generator().manual_seed(0)
    batches = [sampler.draw(generator) for _ in range(1 + MEASURED)]
    seconds = 0.0
    for number in [0, *range(1, 1 + MEASURED), *range(1, 1 + MEASURED)]:
        start = time.process_time()
        loss(network(batches[number]), batches[number]).backward()
        seconds += 0 if number == 0 else time.process_time() - start
    return seconds / (2 * MEASURED)


def confusion(labels, found, num_classes):
    """Counts (K, K) of points by label and by what was found, of those that have a label."""
    known = labels >= 0
    pairs = num_classes * labels[known] + found[known]
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)


def scores(counts):
    """Percent of points that are right, and the mean intersection over union of the labels that occur."""
    both, occurs = counts.diagonal(), counts.sum(1) > 0
    either = counts.sum(0) + counts.sum(1) - both
    return {
        "accuracy": 100 * float(both.sum() / counts.sum()),
        "mean IoU": 100 * float((both / either)[occurs].mean()),
    }


@torch.no_grad()
def predicted(network, sample, data, turn):
    """The most likely labels (N,) of a sample, among those of its kind."""
    batch = Batch([sample], data.kinds, turn)
    return torch.where(batch.is_possible[:, None], network(batch), -torch.inf)[0].argmax(-1)


def samples_to_test(data, name, count, spacing, most):
    """Samples of at most `most` test clouds, each with a rotation (1, 3, 3) of the kind of training."""
    factor, draw = SAMPLINGS[name]
    clouds = data.test[:: -(-len(data.test) // most)] if most < len(data.test) else data.test
    for number, cloud in enumerate(clouds):
        seed = zlib.crc32(f"{name} {number}".encode()) % 2**31
        drawn = draw(cloud, min(round(factor * count), len(cloud.points)), seed)
        turn = rotations(data.rotation, 1, torch.Generator().manual_seed(number))  # the same for all samplings
        yield Sample(drawn, count, spacing), turn


def tested(network, data, count, spacing, most):
    """Scores by sampling, each with the number of clouds; clouds are turned as in training."""
    network.eval()
    results = {}
    for name in SAMPLINGS:
        counts = torch.zeros(data.num_classes, data.num_classes, dtype=torch.long)
        number = 0
        for sample, turn in samples_to_test(data, name, count, spacing, most):
            found = predicted(network, sample, data, turn)
            counts += confusion(sample.cloud.labels, found, data.num_classes)
            number += 1
        results[name] = {**scores(counts), "clouds": number}
    network.train()
    return results
