"""Which devices of a host do what during the rollout phase, and when that should change.

``replan`` is a pure function of what was measured: it forecasts how long the last phases would have taken on
neighbouring splits, and moves for a gain that is large enough, seen in every one of them, and worth its cost. Hosts
decide for themselves; nothing here knows of devices, clocks or processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from yatt_jax.controller.forecast import Load, forecast


@dataclasses.dataclass(frozen=True, order=True)
class Placement:
    """How many of a host's devices each role has during the rollout phase.

    Attributes:
      shares: role and number of devices; the first role samples, the others score what it writes.
    """

    shares: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        roles = [role for role, _ in self.shares]
        if not roles or len(set(roles)) < len(roles):
            raise ValueError(f"shares = {self.shares}: name each role once, the one that samples first")
        if any(count < 1 for _, count in self.shares):
            raise ValueError(f"shares = {self.shares}: every role needs at least one device")

    def __getitem__(self, role: str) -> int:
        """Devices of a role."""
        return dict(self.shares)[role]

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles."""
        return tuple(role for role, _ in self.shares)

    @property
    def devices(self) -> int:
        """Devices of all roles."""
        return sum(count for _, count in self.shares)

    def __str__(self) -> str:
        return " + ".join(f"{role} {count}" for role, count in self.shares)


@dataclasses.dataclass(frozen=True)
class Phase:
    """One rollout phase on one host, as it was measured.

    Attributes:
      placement: that it ran on.
      seconds: from its begin until the last score was there, what moving to the placement cost left out.
      outside: seconds from the end of the last response until the last score that no device computes (a function's, a
        server's); no split changes them.
      loads: of each role.
    """

    placement: Placement
    seconds: float
    outside: float
    loads: Mapping[str, Load]

    def __post_init__(self) -> None:
        if set(self.loads) != set(self.placement.roles):
            raise ValueError(f"loads of {sorted(self.loads)}, and the placement has {sorted(self.placement.roles)}")

    def on(self, others: Sequence[Placement], outside: float) -> list[float]:
        """Seconds that the phase would have taken on other placements.

        Forecasts are scaled by what they say of the placement that was measured, so that what they leave out counts
        alike for all.

        Args:
          others: the placements.
          outside: seconds that scores without devices take, in the place of the phase's own.
        """
        sampled, done = forecast(self.placement.shares, self.loads)
        if not sampled or self.outside >= self.seconds:
            return [self.seconds] * len(others)
        scale = min(self.seconds / done, (self.seconds - self.outside) / sampled)
        ends = [forecast(other.shares, self.loads) for other in others]
        return [max(scale * done, scale * sampled + outside) for sampled, done in ends]


@dataclasses.dataclass(frozen=True)
class Measurements:
    """What the controller knows.

    Attributes:
      phases: the last ones, oldest first; further back than ``Limits.window`` and ``Limits.dwell`` none is read.
      move_seconds: that a move costs: weights of the other roles go to other devices, caches are made anew.
      compile_seconds: that the programs of a new split take to compile.
      compiled: placements whose programs are there.
    """

    phases: Sequence[Phase]
    move_seconds: float = 0.0
    compile_seconds: float = 0.0
    compiled: Collection[Placement] = ()


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a controller may do.

    Attributes:
      units: role -> devices that it needs together (its tensor axis); 1 where a role is not named.
      reach: most units that change hands in one move.
      gain: smallest forecast gain that is worth a move, as a share of the phase's time.
      window: phases that a gain must be seen in.
      dwell: phases that a placement stays.
      horizon: phases over which a move has to earn what it costs.
      background: compile a new split while the old one goes on, and move when it is there; else the move waits for it.
    """

    units: Mapping[str, int] = dataclasses.field(default_factory=dict)
    reach: int = 2
    gain: float = 0.04
    window: int = 2
    dwell: int = 3
    horizon: int = 10
    background: bool = True

    def __post_init__(self) -> None:
        for name in ("reach", "window", "dwell", "horizon"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if not 0 < self.gain < 1:
            raise ValueError(f"gain = {self.gain}: must be above 0 and below 1")
        for role, unit in self.units.items():
            if unit < 1:
                raise ValueError(f"units[{role!r}] = {unit}: must be at least 1")


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do next.

    Attributes:
      placement: for the next phase.
      reason: why, in a line for the log.
      seconds: forecast of the next phase on it; NaN where nothing was measured yet.
      compile: placements whose programs should be compiled in the background.
    """

    placement: Placement
    reason: str
    seconds: float
    compile: tuple[Placement, ...] = ()


def replan(placement: Placement, measurements: Measurements, limits: Limits) -> Decision:
    """Whether to go on with a placement or to move to a neighbouring one.

    Args:
      placement: the one in use.
      measurements: of the phases so far.
      limits: what is allowed.
    """
    recent = list(measurements.phases[-limits.window :])
    if len(recent) < limits.window:
        return Decision(placement, f"stays: {len(recent)} of {limits.window} phases measured", math.nan)
    # What a server or function needed once says little of the next phase.
    outside = min(phase.outside for phase in recent)
    others = [other for other in neighbours(placement, limits) if _agrees(recent, placement, other)]
    seconds = np.array([phase.on([placement, *others], outside) for phase in recent]).T
    now = seconds[0]
    best, there = placement, True

    def stays(why: str) -> Decision:
        ahead = () if there or not limits.background else (best,)
        return Decision(placement, f"stays: {why}", _ahead(now), ahead)

    if not others:
        return stays("what waits and what queues speak for no neighbour")
    options = list(zip(seconds[1:], others, strict=True))
    # What was a gain in every phase comes before what would be a larger one now.
    lasting = [option for option in options if (option[0] <= now).all()]
    then, best = min(lasting or options, key=lambda option: (_ahead(option[0]), option[1]))
    there = best in measurements.compiled
    gains = 1 - then / now
    figures = f"{now[-1]:.3g} s now, {then[-1]:.3g} s forecast for {best}"
    if not lasting or _ahead(gains) < limits.gain:
        return stays(f"{figures}, no gain of {limits.gain:.0%} that lasts")
    stayed = _stayed(placement, measurements.phases)
    if stayed < min(limits.dwell, len(measurements.phases)):
        return stays(f"{figures}, in use for {stayed} of {limits.dwell} phases")
    cost = measurements.move_seconds + (0.0 if there or limits.background else measurements.compile_seconds)
    saved = float((now - then).mean()) * limits.horizon
    if saved < cost:
        return stays(f"{figures}, saves {saved:.3g} s in {limits.horizon} phases and costs {cost:.3g} s")
    if not there and limits.background:
        return stays(f"{figures}, whose programs are still to be compiled")
    why = ", ".join(f"{role} {_share(recent, role):.0%}" for role in placement.roles)
    return Decision(best, f"moves to {best}: {figures}, {_ahead(gains):.0%} less; waiting was {why}", _ahead(then))


def neighbours(placement: Placement, limits: Limits) -> Iterator[Placement]:
    """Every placement that a move within the limits leads to."""
    counts = dict(placement.shares)
    for source, target in itertools.permutations(placement.roles, 2):
        unit = int(np.lcm(limits.units.get(source, 1), limits.units.get(target, 1)))
        for moved in range(unit, limits.reach * unit + 1, unit):
            if counts[source] > moved:
                changed = counts | {source: counts[source] - moved, target: counts[target] + moved}
                yield Placement(tuple(changed.items()))


def placements(roles: Sequence[str], devices: int, units: Mapping[str, int]) -> list[Placement]:
    """Every way to share a host's devices among roles, all of them used.

    Args:
      roles: the one that samples first.
      devices: of the host.
      units: role -> devices that it needs together; 1 where it is not named.
    """
    choices = [range(units.get(role, 1), devices + 1, units.get(role, 1)) for role in roles]
    found = (counts for counts in itertools.product(*choices) if sum(counts) == devices)
    return [Placement(tuple(zip(roles, counts, strict=True))) for counts in found]


def _ahead(values: np.ndarray) -> float:
    """The next value of a series by the straight line through it."""
    if len(values) == 1:
        return float(values[0])
    return float(np.polyval(np.polyfit(np.arange(len(values)), values, 1), len(values)))


def _stayed(placement: Placement, phases: Sequence[Phase]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda phase: phase.placement == placement, reversed(phases)))


def _share(phases: Sequence[Phase], role: str) -> float:
    """Share of the phases in which a role had nothing to do."""
    return sum(phase.loads[role].waiting for phase in phases) / max(sum(phase.seconds for phase in phases), 1e-9)


def _agrees(phases: Sequence[Phase], now: Placement, other: Placement) -> bool:
    """Whether a move fits what was seen: not from a role that waited less, and had the longer queue."""
    (source,) = [role for role in now.roles if other[role] < now[role]]
    (target,) = [role for role in now.roles if other[role] > now[role]]

    def queue(role: str) -> float:
        return float(np.mean([phase.loads[role].queue for phase in phases]))

    return _share(phases, source) >= _share(phases, target) or queue(source) <= queue(target)
