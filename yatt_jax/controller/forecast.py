"""How long a rollout phase would take on other shares of a host's devices: a coarse replay of what was measured.

While one share samples, others score what it writes. Each role is a queue before a number of slots: a row comes, is
taken in (its prompt computed), takes so many decode steps, and leaves. A decode step takes ``step + row * n`` seconds
with n rows on a device: reading the weights costs the same for few rows as for many, which is why half the devices need
less than twice the time. The replay moves at most ``GROUPS`` groups of rows through these queues, in milliseconds.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np

from yatt_jax.rollout.pace import Chunk, fit_steps

GROUPS = 128


@dataclasses.dataclass(frozen=True)
class Load:
    """What one role did in one rollout phase on one host.

    Attributes:
      busy: seconds in which its devices had rows to compute.
      waiting: seconds of the phase in which they had none.
      queue: rows that waited for a slot, mean over ``busy``.
      rows: rows that it sampled or scored.
      replaced: those of them that were sampled in the place of others, after their scores.
      slots: most rows at a time on each device.
      lengths: decode steps of rows, any number of them, in any order that is not by length; zeros for a model that
        scores without writing.
      step: seconds of a decode step without rows; see ``pace.fit_steps``.
      row: seconds that each row on a device adds to it.
      admit: seconds that a device needs to take a row in, padding left out.
    """

    busy: float
    waiting: float
    queue: float
    rows: int
    slots: int
    lengths: tuple[int, ...]
    step: float
    row: float
    admit: float
    replaced: int = 0

    def __post_init__(self) -> None:
        for name in ("busy", "waiting", "queue", "rows", "step", "row", "admit"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be a finite number, 0 or more")
        if not 0 <= self.replaced <= self.rows:
            raise ValueError(f"replaced = {self.replaced}: must be among the {self.rows} rows")
        if self.slots < 1:
            raise ValueError(f"slots = {self.slots}: must be at least 1")
        if self.rows and not self.lengths:
            raise ValueError(f"{self.rows} rows and no lengths; give zeros where nothing is written")


def measured_load(
    chunks: Sequence[Chunk], lengths: Sequence[int], *, seconds: float, devices: int, slots: int, replaced: int = 0
) -> Load:
    """What an engine did in a phase, from the chunks that it timed.

    Args:
      chunks: at least one; see ``Engine.stats``.
      lengths: tokens that each row wrote.
      seconds: of the phase.
      devices: of the engine's share.
      slots: rows at a time on each device.
      replaced: see ``Load``.
    """
    plain = [chunk for chunk in chunks if not chunk.admitted]
    step, row = fit_steps(plain or chunks)
    busy = sum(chunk.seconds for chunk in chunks)
    # What chunks that took rows in lasted longer than their steps; each device takes in whole rows.
    taking_in = sum(max(0.0, c.seconds - c.steps * (step + row * c.rows)) for c in chunks if c.admitted)
    turns = sum(math.ceil(chunk.admitted / devices) for chunk in chunks)
    return Load(
        busy=busy,
        waiting=max(0.0, seconds - busy),
        queue=sum(chunk.waiting * chunk.seconds for chunk in chunks) / busy if busy else 0.0,
        rows=len(lengths),
        slots=slots,
        lengths=tuple(lengths),
        step=step,
        row=row,
        admit=taking_in / turns if turns else 0.0,
        replaced=replaced,
    )


def forecast(shares: Sequence[tuple[str, int]], loads: Mapping[str, Load]) -> tuple[float, float]:
    """Seconds until all rows are sampled, and until all are scored.

    Args:
      shares: role and number of devices, the one that samples first.
      loads: of each role.
    """
    sampler, *scorers = (_Queue(loads[role], devices, loads[shares[0][0]]) for role, devices in shares)
    groups, later = sampler.groups, sampler.groups - sampler.first
    for group in range(sampler.first):
        sampler.add(0.0, group)
    begun, scored, sampled, done = sampler.first, 0, 0.0, 0.0
    missing = [len(scorers)] * groups  # scores of each group that are still to come
    while (queue := min([sampler, *scorers], key=lambda queue: queue.next)).next < math.inf:
        for group in queue.advance():
            done = max(done, queue.now)
            if queue is sampler:
                sampled = queue.now
                for scorer in scorers:
                    scorer.add(sampled, group)
                continue
            missing[group] -= 1
            scored += not missing[group]
            # Groups are replaced as others are scored, in the same proportion all the time.
            while begun - sampler.first < math.ceil(scored * later / groups):
                sampler.add(queue.now, begun)
                begun += 1
    return sampled, done


class _Queue:
    """A role's groups of rows, waiting for slots and in them.

    Args:
      load: of the role.
      devices: that it has.
      sampler: load of the role that samples, which says how many groups there are.
    """

    def __init__(self, load: Load, devices: int, sampler: Load):
        self.groups = min(GROUPS, sampler.rows)
        size = load.rows / max(1, self.groups)  # rows of a group, several for each sample where a judge votes
        later = round(self.groups * sampler.replaced / max(1, sampler.rows))
        self.first = max(1, self.groups - later) if self.groups else 0
        self._lengths = _spread(load.lengths, self.groups)
        self._room = max(1, round(load.slots * devices / max(1.0, size)))  # groups at a time
        self._admit, self._rows = load.admit, size / devices
        self._step, self._each = load.step, load.row * size / devices
        self._coming: list[tuple[float, int]] = []
        self._running: list[tuple[float, int]] = []  # step at which a group leaves, and its number
        self._walked = self.now = 0.0

    def add(self, when: float, group: int) -> None:
        """A group comes."""
        heapq.heappush(self._coming, (when, group))

    @property
    def next(self) -> float:
        """The next moment at which something happens to it."""
        if self._running and not self._admits:
            return self.now + (self._running[0][0] - self._walked) * self._pace
        return max(self.now, self._coming[0][0]) if self._coming else math.inf

    @property
    def _pace(self) -> float:
        return self._step + self._each * len(self._running)

    @property
    def _admits(self) -> bool:
        """Whether a group comes before the next one leaves, and finds room."""
        if not self._coming or len(self._running) >= self._room:
            return False
        until = self.now + (self._running[0][0] - self._walked) * self._pace if self._running else math.inf
        return self._coming[0][0] < until

    def advance(self) -> list[int]:
        """Goes to that moment; returns the groups that leave then."""
        if not self._admits:
            self.now, self._walked = self.next, self._running[0][0]
            ended = []
            while self._running and self._running[0][0] <= self._walked:
                ended.append(heapq.heappop(self._running)[1])
            return ended
        moment = self.next
        if self._running and self._pace:
            self._walked += (moment - self.now) / self._pace
        fresh = 0
        while self._coming and self._coming[0][0] <= moment and len(self._running) < self._room:
            _, group = heapq.heappop(self._coming)
            heapq.heappush(self._running, (self._walked + self._lengths[group], group))
            fresh += 1
        self.now = moment + self._admit * math.ceil(fresh * self._rows)  # each device takes in whole rows
        return []


def _spread(lengths: Sequence[int], count: int) -> list[float]:
    """``count`` lengths of the same distribution, long and short ones mixed as they came."""
    given = np.asarray(lengths, float)
    if not count or not len(given):
        return [0.0] * count
    if len(given) == count:
        return given.tolist()
    values = np.quantile(given, (np.arange(count) + 0.5) / count)
    # Ranks in the order of a golden-ratio walk: as mixed as random ones, and always the same.
    ranks = np.argsort(np.arange(count) * 0.6180339887498949 % 1.0)
    return values[ranks].tolist()
