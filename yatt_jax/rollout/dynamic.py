"""Dynamic sampling (Yu et al. 2025, DAPO): prompts are drawn in waves until a step has enough groups with a signal.

A group whose responses all got the same reward has no advantage and teaches nothing, so it is dropped and others are
drawn. Everything here is policy: plain values in, plain values out. The loop samples and scores, keeps the generations
of groups by their number, and agrees on counts with the other processes; given the same counts, every process decides
the same. A step goes

    state, pool = begin(state, options, step)
    waves = 0
    while count := wave_size(state, options, wanted=wanted, have=len(pool), waves=waves):
        ...draw, sample and score `count` prompts; judge their groups...
        state = observe(state, options, drawn=count, with_signal=...)
        pool, waves = pool + [...the groups with a signal...], waves + 1
    used, state, missing = settle(state, pool, wanted=wanted)

and what is missing is filled as ``options.shortfall`` says.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from yatt_jax.ops.options import Count, CountOrZero, Range, check

DECAY = 0.9

Factor: TypeAlias = Annotated[float, Range(1)]
Verdict: TypeAlias = Literal["signal", "all_zero", "all_one", "all_equal", "invalid"]


@dataclasses.dataclass(frozen=True)
class DynamicSampling:
    """How a step gets groups with a signal.

    Attributes:
      enabled: drop groups without one, and draw more prompts; else a step trains on whatever it drew.
      max_waves: draws in a step, the first included.
      oversampling: prompts are drawn for so many times the groups that are missing.
      ratio_cap: the most prompts a group with a signal is thought to take.
      max_age: steps for which surplus groups are kept; 0 drops them at the end of their step.
      shortfall: what happens when the waves do not bring enough groups: "pad" trains on fewer (rows of zero weight take
        their place), "fill" takes groups without a signal, "fail" ends the run.
    """

    enabled: bool = False
    max_waves: Count = 10
    oversampling: Factor = 1.0
    ratio_cap: Factor = 8.0
    max_age: CountOrZero = 1
    shortfall: Literal["pad", "fill", "fail"] = "pad"

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True)
class Group:
    """A group with a signal whose generations the loop holds.

    Attributes:
      number: of its prompt, in the run's global sequence of prompts; unique, and the same for any number of processes.
      step: in which it was sampled.
    """

    number: int
    step: int


@dataclasses.dataclass(frozen=True)
class DynamicState:
    """What is carried from step to step; the same on every process, for any number of them.

    Attributes:
      ratio: moving average of groups drawn over groups with a signal; 0 before the first wave.
      surplus: groups for the next step, in the order they were sampled.
    """

    ratio: float = 0.0
    surplus: tuple[Group, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a checkpoint. The generations of the surplus are saved beside it, by number."""
        return {"ratio": self.ratio, "surplus": [[group.number, group.step] for group in self.surplus]}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> DynamicState:
        """The state that ``to_json`` wrote, taken up by any number of processes."""
        return DynamicState(float(saved["ratio"]), tuple(Group(int(n), int(s)) for n, s in saved["surplus"]))


def judge(rewards: Sequence[float]) -> Verdict:
    """Whether the responses of a group differ in their rewards.

    Args:
      rewards: one a response; NaN or infinite where it is invalid, and then it does not count.

    Returns:
      "signal"; or why there is none: all rewards are 0, are 1, are equal otherwise, or fewer than two are valid.
    """
    valid = [float(reward) for reward in rewards if math.isfinite(reward)]
    if len(valid) < 2:
        return "invalid"
    if min(valid) < max(valid):
        return "signal"
    if valid[0] == 0:
        return "all_zero"
    return "all_one" if valid[0] == 1 else "all_equal"


def begin(state: DynamicState, options: DynamicSampling, step: int) -> tuple[DynamicState, list[Group]]:
    """Opens a step: surplus groups that are still fresh enough come first.

    Returns:
      The state without surplus, and the groups to begin with. Generations of other groups can be let go.
    """
    fresh = [group for group in state.surplus if step - group.step <= options.max_age]
    return dataclasses.replace(state, surplus=()), fresh


def wave_size(state: DynamicState, options: DynamicSampling, *, wanted: int, have: int, waves: int) -> int:
    """Prompts of the next wave: ``ceil(gap * ratio * oversampling)``, and 0 when no wave is due.

    Args:
      state: holds the ratio; before the first wave it counts as 1.
      options: oversampling, and how many waves there may be.
      wanted: groups that the step trains on.
      have: groups with a signal so far.
      waves: that the step has had.
    """
    gap = wanted - have
    if gap <= 0 or waves >= options.max_waves:
        return 0
    # Rounded first, so that 10 * 1.1 asks for 11 and not, by a rounding error, for 12.
    return math.ceil(round(gap * max(state.ratio, 1.0) * options.oversampling, 9))


def observe(state: DynamicState, options: DynamicSampling, *, drawn: int, with_signal: int) -> DynamicState:
    """Learns from a wave how many prompts a group with a signal takes.

    The ratio is ``drawn / with_signal``, at most ``ratio_cap`` (also where no group had one), as an exponential moving
    average of decay .9 that begins with the first wave's.

    Args:
      state: before the wave.
      options: the cap.
      drawn: groups of the wave over all processes; 0 changes nothing.
      with_signal: those of them with a signal.
    """
    if drawn == 0:
        return state
    seen = min(drawn / with_signal, options.ratio_cap) if with_signal else options.ratio_cap
    return dataclasses.replace(state, ratio=DECAY * state.ratio + (1 - DECAY) * seen if state.ratio else seen)


def settle(state: DynamicState, pool: Iterable[Group], *, wanted: int) -> tuple[list[Group], DynamicState, int]:
    """Closes a step: the groups to train on, the oldest first, and those to keep.

    The choice does not depend on the order of the pool, and so not on which process sampled what.

    Args:
      state: of the step.
      pool: groups with a signal, over all processes.
      wanted: groups that the step trains on.

    Returns:
      Groups to train on, in order; the state of the next step, with the others as its surplus; how many are missing.
    """
    ordered = sorted(pool, key=lambda group: (group.step, group.number))
    state = dataclasses.replace(state, surplus=tuple(ordered[wanted:]))
    return ordered[:wanted], state, max(0, wanted - len(ordered))


def explain(verdicts: Iterable[Verdict], *, wanted: int, have: int, waves: int) -> str:
    """Why a step came short, and how to mend it.

    Args:
      verdicts: of all groups that the step drew.
      wanted: groups that it should have.
      have: groups with a signal that it has.
      waves: that it took.
    """
    counts = collections.Counter(verdicts)
    drawn = max(1, counts.total())
    named: dict[Verdict, str] = {
        "all_zero": "all 0",
        "all_one": "all 1",
        "all_equal": "all equal otherwise",
        "invalid": "without two valid",
    }
    shares = ", ".join(f"{100 * counts[key] / drawn:.0f} % {text}" for key, text in named.items())
    return (
        f"dynamic sampling found {have} of {wanted} groups whose rewards differ in {waves} waves of {counts.total()} "
        f"prompts; rewards of the groups drawn: {shares}. Use easier or harder prompts, more samples a prompt, a "
        "reward with more than two values, or more waves (rollout.dynamic.max_waves); rollout.dynamic.shortfall says "
        "what a step does that comes short"
    )
