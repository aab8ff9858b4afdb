"""Training that can be interrupted: schedules by number of steps or by time, and checkpoints, never half a file.

Time is that of the processor, summed over threads, so that waiting for other programs does not count. What they take
of caches and memory does: compare times of machines that are equally busy. That of the clock on the wall is recorded
beside it.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tqdm import tqdm

CLIP = 1.0  # norm of gradients
BAR = "{desc}: {percentage:5.1f}%|{bar}| {elapsed}, {remaining} left{postfix}"


@dataclass(frozen=True)
class Budget:
    """Limit of a training: a number of steps, or of seconds of the processor."""

    steps: int | None = None
    seconds: float | None = None

    def spent(self, steps, seconds):
        """Fraction of the budget, from 0 to 1, that some steps and seconds are."""
        return min(1.0, steps / self.steps if self.steps is not None else seconds / self.seconds)


class Clock:
    """Seconds of the processor by part of a step."""

    def __init__(self):
        self.seconds = defaultdict(float)

    @contextmanager
    def part(self, name):
        start = time.process_time()
        yield
        self.seconds[name] += time.process_time() - start


def cosine(done, last, warm=0.0):
    """Factor of the rate at a fraction of the budget: up to 1 until `warm`, then down to `last`."""
    if done < warm:
        return max(done, 1e-3) / warm
    return last + (1 - last) * (1 + math.cos(math.pi * (done - warm) / (1 - warm))) / 2


class Resumable(ABC):
    """A network, its optimizer and all that is needed to go on where it was.

    Args:
        network: Module that is trained.
        optimizer: Optimizer of its parameters.
        schedule: Function from the fraction of the budget that is spent to the learning rate.
        names: Names of the losses, whose sum is minimized.
        seed: Seed of `generator`, of which all random choices are.
        path: File of the checkpoint. If it exists, training goes on from there.
        settings: Numbers and names that the training depends on, which have to be those of the checkpoint.
    """

    record_every = 25  # steps between two points of the curve of losses

    def __init__(self, network, optimizer, schedule, names, seed, path, settings=None):
        self.network, self.optimizer, self.schedule, self.names, self.path = network, optimizer, schedule, names, path
        self.generator, self.settings = torch.Generator().manual_seed(seed), settings or {}
        self.step, self.seconds, self.wall, self.curve, self.clock = 0, 0.0, 0.0, [], Clock()
        self._recent = torch.zeros(len(names))
        if path.exists():
            self._restore(torch.load(path, weights_only=True))

    @abstractmethod
    def losses(self):
        """Losses (L,) of the next batch, which is drawn by `generator`."""

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
                start, on_wall = time.process_time(), time.perf_counter()
                self._advance(self.schedule(done))
                self.seconds += time.process_time() - start
                self.wall += time.perf_counter() - on_wall
                now = budget.spent(self.step, self.seconds)
                bar.update(now - done)
                done = now
                if self.step % self.record_every == 0 or done == 1:
                    self.record()
                    found = zip(self._recent.tolist(), self.names, strict=True)
                    bar.set_postfix_str(", ".join(f"{loss:.3g} {name}" for loss, name in found))
                    if on_record is not None:
                        on_record(self)
                if time.perf_counter() - saved > save_every:
                    self.save()
                    saved = time.perf_counter()
        self.save()

    def _advance(self, rate):
        """Take one step of the optimizer."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = self.losses()
        with self.clock.part("backward"):
            self.optimizer.zero_grad()
            losses.sum().backward()
        with self.clock.part("optimizer"):
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), CLIP, error_if_nonfinite=True)
            self.optimizer.step()
        self.step += 1
        losses = losses.detach()
        self._recent = losses if self.step == 1 else torch.lerp(self._recent, losses, max(0.04, 1 / self.step))

    def record(self):
        spent = {"seconds": round(self.seconds, 1), "wall seconds": round(self.wall, 1)}
        self.curve.append({"step": self.step, **spent, "losses": self._recent.tolist()})

    def save(self):
        """Write the checkpoint: network, optimizer, random states, and what was spent; never half a file."""
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "torch": torch.get_rng_state(),
            "step": self.step,
            "seconds": self.seconds,
            "wall": self.wall,
            "settings": self.settings,
            "curve": self.curve,
            "recent": self._recent,
            "parts": dict(self.clock.seconds),
        }
        unfinished = self.path.with_suffix(".part")
        torch.save(state, unfinished)
        unfinished.replace(self.path)

    def _restore(self, state):
        then, now = state["settings"], self.settings
        differing = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        if differing:
            was = ", ".join(f"{name} was {then.get(name)}, not {now.get(name)}" for name in differing)
            raise SystemExit(f"{self.path} is of another training: {was}. Take its settings, or another folder.")
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch"])
        self.step, self.seconds, self.wall, self.curve = (state[name] for name in ("step", "seconds", "wall", "curve"))
        self._recent = state["recent"]
        self.clock.seconds.update(state["parts"])
