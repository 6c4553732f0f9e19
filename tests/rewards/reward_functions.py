"""Reward functions as a user would write them, found by import path."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np

from yatt_jax.rewards import Failed, Invalid
from yatt_jax.rewards.counts import Counts

threads: set[str] = set()
called: list[list[int]] = []
event = threading.Event()


def size(samples, *, scale=1.0):
    return [scale * len(sample.completion) for sample in samples]


def some_invalid(samples):
    values = {"none": None, "nan": float("nan"), "inf": float("inf"), "reason": Invalid("no verdict")}
    return [values.get(sample.completion, 0.7) for sample in samples]


def fails_on_bad(samples):
    if any(sample.completion == "bad" for sample in samples):
        raise ZeroDivisionError("no luck")
    return [1.0] * len(samples)


def fails_together(samples):
    if len(samples) > 1:
        raise OSError("too many at a time")
    return [0.5]


def too_few(samples):
    return [1.0] * (len(samples) - 1)


def text(samples):
    return ["good" for _ in samples]


def nothing(samples):
    return None


def arrays(samples):
    return np.arange(len(samples))


def truths(samples):
    return [sample.completion == "a" for sample in samples]


def notes_calls(samples):
    called.append([len(sample.completion) for sample in samples])
    if len(called) == 2:
        event.set()
    return [float(len(sample.completion)) for sample in samples]


def notes_threads(samples):
    threads.add(threading.current_thread().name)
    barrier.wait(timeout=20)
    return [float(len(samples))] * len(samples)


barrier = threading.Barrier(3)


def needs_target(samples, *, target):
    return [float(target)] * len(samples)


async def asynchronous(samples):
    return [1.0] * len(samples)


constant = 3


def fails_softly(samples):
    return [Failed("no power") if s.completion == "bad" else 1.0 for s in samples]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a reward that is opened and closed."""

    scale: float = 1.0

    def __post_init__(self):
        if self.scale < 0:
            raise ValueError(f"scale = {self.scale}: must not be negative")

    def open(self):
        return Opened(self.scale)


class Opened:
    """Sizes, and a count of how many were asked for."""

    def __init__(self, scale):
        self.scale, self.counts, self.closed = scale, Counts(), False

    def __call__(self, samples):
        self.counts.add("asked", len(samples))
        return [self.scale * len(s.completion) for s in samples]

    def close(self):
        opened.append(self)


opened: list[Opened] = []


@dataclasses.dataclass(frozen=True)
class NotOpened:
    """Settings without ``open``."""
