"""Training that can be interrupted: Adam with a cosine schedule, by number of steps or by wall time."""

import math
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from matching_losses import LOSSES, losses, maps, soft_maps
from tqdm import tqdm

LAST = 0.1  # of the rate, at the end of the schedule
RECORD = 25  # steps between two points of the curve of losses
CLIP = 1.0  # norm of gradients
BAR = "{desc}: {percentage:5.1f}%|{bar}| {elapsed}, {remaining} left{postfix}"


@dataclass(frozen=True)
class Budget:
    """How long to train: a number of steps, or of seconds."""

    steps: int | None = None
    seconds: float | None = None

    def spent(self, steps, seconds):
        """Fraction of the budget, from 0 to 1, that some steps and seconds are."""
        return min(1.0, steps / self.steps if self.steps is not None else seconds / self.seconds)


class Clock:
    """Seconds by part of a step."""

    def __init__(self):
        self.seconds = defaultdict(float)

    @contextmanager
    def part(self, name):
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


class Training:
    """A network, its optimizer and all that is needed to go on where it was.

    Args:
        network: Module from a batch to unit features (B, N, C).
        sampler: Source of batches.
        rate: Learning rate at the start.
        num_pairs: Number of pairs of shapes in a step.
        seed: Seed of the pairs, samples and rotations.
        path: File of the checkpoint. If it exists, training goes on from there.
    """

    def __init__(self, network, sampler, rate, num_pairs, seed, path):
        self.network, self.sampler, self.rate, self.num_pairs, self.path = network, sampler, rate, num_pairs, path
        self.optimizer = torch.optim.Adam(network.parameters(), rate)
        self.generator = torch.Generator().manual_seed(seed)
        self.step, self.seconds, self.curve, self.clock = 0, 0.0, [], Clock()
        self._recent = torch.zeros(len(LOSSES))
        if path.exists():
            self._restore(torch.load(path, weights_only=True))

    def run(self, budget, save_every, on_record=None):
        """Train until the budget is spent; a checkpoint is written every `save_every` seconds and at the end.

        Args:
            budget: A `Budget`, of which what the checkpoint has spent is a part.
            save_every: Seconds between checkpoints.
            on_record: Called with this training at each point of the curve, while its own time is not counted.
        """
        saved = time.perf_counter()
        done = budget.spent(self.step, self.seconds)
        with tqdm(total=1.0, initial=done, desc="training", disable=None, bar_format=BAR) as bar:
            while done < 1:
                start = time.perf_counter()
                rate = self.rate * (LAST + (1 - LAST) * (1 + math.cos(math.pi * done)) / 2)
                self._advance(rate)
                self.seconds += time.perf_counter() - start
                now = budget.spent(self.step, self.seconds)
                bar.update(now - done)
                done = now
                if self.step % RECORD == 0 or done == 1:
                    self.record()
                    bar.set_postfix_str("{:.1f} bijective, {:.1f} orthogonal, {:.1f} aligned".format(*self._recent))
                    if on_record is not None:
                        on_record(self)
                if time.perf_counter() - saved > save_every:
                    self.save()
                    saved = time.perf_counter()
        self.save()

    def _advance(self, rate):
        """Take one step of Adam."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
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
            three = losses(C, soft_maps(features, vectors, projections))
        with clock.part("backward"):
            self.optimizer.zero_grad()
            three.sum().backward()
        with clock.part("optimizer"):
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), CLIP, error_if_nonfinite=True)
            self.optimizer.step()
        self.step += 1
        three = three.detach()
        self._recent = three if self.step == 1 else torch.lerp(self._recent, three, max(0.04, 1 / self.step))

    def record(self):
        self.curve.append({"step": self.step, "seconds": round(self.seconds, 1), "losses": self._recent.tolist()})

    def save(self):
        """Write the checkpoint: network, optimizer, random states, and what was spent; never half a file."""
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "torch": torch.get_rng_state(),
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
            "recent": self._recent,
            "parts": dict(self.clock.seconds),
        }
        unfinished = self.path.with_suffix(".part")
        torch.save(state, unfinished)
        unfinished.replace(self.path)

    def _restore(self, state):
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch"])
        self.step, self.seconds, self.curve = state["step"], state["seconds"], state["curve"]
        self._recent = state["recent"]
        self.clock.seconds.update(state["parts"])
