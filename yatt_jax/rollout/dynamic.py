"""Dynamic sampling (Yu et al. 2025, DAPO): prompts are drawn in waves until a step has enough groups with a signal.

A group whose responses all got the same reward has no advantage and teaches nothing, so it is dropped and others are
drawn. Everything here is policy: plain values in, plain values out, so that every process, given the same counts,
decides the same; ``controller.collect`` samples and scores.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, TypeAlias

from yatt_jax.ops.options import Count, Range, check

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
      shortfall: what happens when the waves do not bring enough groups: "pad" trains on fewer (rows of zero weight take
        their place), "fill" takes groups without a signal, "fail" ends the run.
    """

    enabled: bool = False
    max_waves: Count = 10
    oversampling: Factor = 1.0
    ratio_cap: Factor = 8.0
    shortfall: Literal["pad", "fill", "fail"] = "pad"

    def __post_init__(self) -> None:
        check(self)


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


def wave_size(ratio: float, options: DynamicSampling, *, wanted: int, have: int, waves: int) -> int:
    """Prompts of the next wave: ``ceil(gap * ratio * oversampling)``, and 0 when no wave is due.

    Args:
      ratio: of groups drawn to groups with a signal, as ``observed`` has it; below 1 it counts as 1.
      options: oversampling, and how many waves there may be.
      wanted: groups that the step trains on.
      have: groups with a signal so far.
      waves: that the step has had.
    """
    gap = wanted - have
    if gap <= 0 or waves >= options.max_waves:
        return 0
    # Rounded first, so that 10 * 1.1 asks for 11 and not, by a rounding error, for 12.
    return math.ceil(round(gap * max(ratio, 1.0) * options.oversampling, 9))


def observed(ratio: float, options: DynamicSampling, *, drawn: int, with_signal: int) -> float:
    """Learns from a wave how many prompts a group with a signal takes.

    ``drawn / with_signal``, at most ``ratio_cap`` (also where no group had one), as an exponential moving average of
    decay .9 that begins with the first wave's.

    Args:
      ratio: before the wave; 0 before the first.
      options: the cap.
      drawn: groups of the wave over all processes; 0 changes nothing.
      with_signal: those of them with a signal.
    """
    if drawn == 0:
        return ratio
    seen = min(drawn / with_signal, options.ratio_cap) if with_signal else options.ratio_cap
    return DECAY * ratio + (1 - DECAY) * seen if ratio else seen


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
