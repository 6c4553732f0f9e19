"""Figures of a step that are worked out on the host, one process at a time, and then added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from yatt_jax.controller.hosts import Sums
from yatt_jax.errors import RunFailure
from yatt_jax.ops.estimates import attempts
from yatt_jax.parallel.balance import Assignment
from yatt_jax.parallel.fill import Filling
from yatt_jax.parallel.repartition import Moved
from yatt_jax.rewards import Scores
from yatt_jax.rollout.engine import Stats
from yatt_jax.types import PyTree, Sample

_SQUARES = "reward_squares"
_OF_SQUARES, _COUNT = " squares", " count"


def mean_advantages(batch: PyTree) -> jax.Array:
    """Mean advantage of each row over its trained tokens."""
    mask = batch.response_mask
    return jnp.sum(batch.advantages * mask, axis=-1) / jnp.maximum(jnp.sum(mask, axis=-1), 1.0)


def score_sums(rewards: Scores) -> Sums:
    """What samples scored, as totals and weights, to be added over processes: ``reward``, its square, each single one.

    ``variance`` takes the square out of the means again.
    """
    total = np.asarray(rewards.total, np.float64)
    single = {f"reward/{name}": np.asarray(values, np.float64) for name, values in rewards.rewards.items()}
    found: Sums = {}
    for name, values in {"reward": total, _SQUARES: total**2, **single}.items():
        finite = values[np.isfinite(values)]
        found[name] = float(finite.sum()), len(finite)
    return found


def prompt_figures(samples: int, votes: bool, win_rate: bool) -> list[str]:
    """Names of what an evaluation measures of each prompt, and reports with an interval."""
    several = [f"pass@{k}" for k in attempts(samples)] if samples > 1 else []
    return ["reward", *several, *([f"maj@{samples}"] if votes else []), *(["win_rate"] if win_rate else [])]


def prompt_sums(figures: Mapping[str, Sequence[float]]) -> Sums:
    """Figures of this process's prompts, one of each prompt, as totals and weights; NaN does not count.

    ``with_intervals`` takes the squares out of the means again.
    """
    found: Sums = {}
    for name, values in figures.items():
        known = np.asarray(values, np.float64)
        known = known[np.isfinite(known)]
        found[name] = float(known.sum()), len(known)
        found[f"{name}{_OF_SQUARES}"] = float((known**2).sum()), len(known)
        found[f"{name}{_COUNT}"] = len(known), None
    return found


def with_intervals(means: Mapping[str, float]) -> dict[str, float]:
    """Means of ``prompt_sums`` with the half-width of their 95 % interval, the prompts being drawn independently."""
    found = {}
    for name, mean in means.items():
        if name.endswith((_OF_SQUARES, _COUNT)):
            continue
        found[name] = mean
        count = means.get(f"{name}{_COUNT}", 0.0)
        if count > 1:
            spread = max(means[f"{name}{_OF_SQUARES}"] - mean**2, 0.0)
            found[f"{name}_ci95"] = 1.96 * math.sqrt(spread / (count - 1))
    return found


def variance(means: dict[str, float]) -> float:
    """The variance of the rewards over all samples; NaN where there is none. Removes the mean square."""
    found = means.pop(_SQUARES) - means["reward"] ** 2
    return found if math.isnan(found) else max(found, 0.0)


def reward_sums(rewards: Scores, samples: Sequence[Sample]) -> Sums:
    """Figures about this process's rewards as totals and weights, to be added over processes.

    ``score_sums``; invalid values, errors and counts of each reward; the share of groups whose samples got the same.
    """
    found = score_sums(rewards)
    found |= {f"reward_invalid/{name}": (float(count), None) for name, count in rewards.invalid.items()}
    found |= {f"reward_errors/{name}": (float(count), None) for name, count in rewards.errors.items()}
    found |= {f"reward_counts/{name}": (float(count), None) for name, count in rewards.counts.items()}
    groups: dict[int, list[float]] = {}
    for sample, value in zip(samples, np.asarray(rewards.total, np.float64), strict=True):
        if math.isfinite(value):
            groups.setdefault(sample.group, []).append(value)
    several = [values for values in groups.values() if len(values) > 1]
    same = sum(max(values) == min(values) for values in several)
    return found | {"groups_without_signal": (float(same), len(several))}


def engine_sums(calls: Sequence[Stats]) -> Sums:
    """Figures of this process's sampling in a step, to be added over processes."""
    tokens, steps = (float(sum(getattr(stats, name) for stats in calls)) for name in ("tokens", "steps"))
    computed = sum(stats.computed for stats in calls)
    return {"tokens": (tokens, None), "decode_steps": (steps, 1), "slot_fill": (tokens, computed)}


def moved_sums(moved: Moved | None) -> Sums:
    """Figures of laying the actor out for sampling."""
    if moved is None:
        return {}
    return {
        "repartition_seconds": (moved.seconds or 0.0, 1),
        "repartition_bytes": (moved.received, None),
        "repartition_peak_bytes": (moved.peak, 1),
    }


def placed_figures(assigned: Assignment, filled: Filling) -> dict[str, float]:
    """How evenly a step's rows lie on the data shards (largest over mean cost), and how full their packs are."""
    return {
        "shard_spread_before": assigned.before,
        "shard_spread": assigned.after,
        "rows_moved": assigned.moved / max(1, len(assigned.shard)),
        "padding": filled.padding,
        "micro_batches": float(filled.large + filled.small),
    }


def packing_figures(filled: Sequence[Filling], shards: int) -> dict[str, float]:
    """How full the packs of a step's updates were.

    ``padding`` (share of their tokens), ``micro_batches`` (in an update), ``micro_tokens`` (of a micro-batch on one
    data shard, without padding) and ``micro_spread`` (largest over mean cost of the shards, summed over micro-batches).
    """
    if not filled:
        return {}
    tokens, held = sum(one.tokens for one in filled), sum(one.held for one in filled)
    micro = sum(one.large + one.small for one in filled)
    return {
        "padding": 1.0 - tokens / max(1, held),
        "micro_batches": micro / len(filled),
        "micro_tokens": tokens / max(1, micro * shards),
        "micro_spread": sum(one.spread for one in filled) / len(filled),
    }


def spread(means: dict[str, float]) -> dict[str, float]:
    """Turns the moments of ``reward_sums`` into a standard deviation, and leaves out what there is none of."""
    means["reward_std"] = math.sqrt(variance(means))
    del means["reward"]  # the devices report it, with the rows that training leaves out
    return {name: value for name, value in means.items() if math.isfinite(value) or name != "groups_without_signal"}


def rates(schedules: Mapping[str, Callable[[int], Any]], counters: Mapping[str, Any]) -> dict[str, float]:
    """Learning rate, updates done and updates skipped of each role that is trained."""
    found = {}
    for role, schedule in schedules.items():
        step = int(counters[f"{role}/step"])
        found[f"{role}/learning_rate"] = float(schedule(step))
        found[f"{role}/updates"] = float(step)
        found[f"{role}/skipped"] = float(counters[f"{role}/skipped"])
    return found


def check_skipped(counters: Mapping[str, Any], roles: Iterable[str], limit: int) -> None:
    """Stops a run that makes no headway.

    Raises:
      RunFailure: ``limit`` updates of a role in a row had a loss or gradient that is not finite.
    """
    for role in roles:
        in_row = int(counters[f"{role}/skipped_in_row"])
        if in_row >= limit:
            raise RunFailure(
                f"{in_row} updates of the {role} in a row had a non-finite loss or gradient "
                f"(config.train.max_skipped = {limit}); its weights are those before the first of them. "
                "Lower the learning rate, or look at what it was trained on last"
            )
