"""Responses to one prompt, compared with each other."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from yatt_jax.ops.masking import masked_mean
from yatt_jax.ops.options import check

STD_EPS = 1e-4  # added to standard deviations that scores are divided by


@dataclasses.dataclass(frozen=True)
class Advantage:
    """What a response's score is compared with, and in which unit; see ``group_advantages``."""

    baseline: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    scale: Literal["group_std", "batch_std", "none"] = "group_std"

    def __post_init__(self) -> None:
        check(self)

    def faults(self, samples_per_prompt: int) -> list[str]:
        """Why these options cannot train with so many responses to a prompt; empty if they can."""
        used = [f"baseline = {self.baseline!r}"] if self.baseline != "none" else []
        used += [f"scale = {self.scale!r}"] if self.scale == "group_std" else []
        return group_faults(samples_per_prompt, f"config.hyper.advantage.{' and '.join(used)}") if used else []


def group_faults(samples_per_prompt: int, what: str) -> list[str]:
    """The fault of comparing the only response to each prompt with itself: every advantage would be 0."""
    if samples_per_prompt > 1:
        return []
    return [
        f"config.rollout.samples_per_prompt = {samples_per_prompt}: {what} compares the responses to one prompt with "
        "each other, and with a single one nothing is learned; set samples_per_prompt to at least 2"
    ]


def group_sum(x: Float[Array, "B"], group: Int[Array, "B"], counts: Float[Array, "B"]) -> Float[Array, "B"]:
    """The sum over each row's group, of the rows that count; every row of a group gets it, wherever it stands."""
    return jax.ops.segment_sum(jnp.where(counts > 0, x, 0.0), group, num_segments=len(group))[group]


def group_mean(x: Float[Array, "B"], group: Int[Array, "B"], counts: Float[Array, "B"]) -> Float[Array, "B"]:
    """The mean over each row's group, of the rows that count; 0 where none does."""
    return group_sum(x, group, counts) / jnp.maximum(group_sum(counts, group, counts), 1.0)


def group_std(x: Float[Array, "B"], group: Int[Array, "B"], counts: Float[Array, "B"]) -> Float[Array, "B"]:
    """The sample standard deviation (ddof 1) of each row's group; 0 where fewer than two rows count."""
    spread = group_sum(jnp.square(x - group_mean(x, group, counts)), group, counts)
    return jnp.sqrt(spread / jnp.maximum(group_sum(counts, group, counts) - 1.0, 1.0))


def all_equal(x: Float[Array, "B"], group: Int[Array, "B"], counts: Float[Array, "B"]) -> Bool[Array, "B"]:
    """Whether all rows of the group that count are the same, to the last bit; also where fewer than two do."""
    rows = len(group)
    high = jax.ops.segment_max(jnp.where(counts > 0, x, -jnp.inf), group, num_segments=rows)
    low = jax.ops.segment_min(jnp.where(counts > 0, x, jnp.inf), group, num_segments=rows)
    return (high <= low)[group]


def centred(x: Float[Array, "B"], group: Int[Array, "B"], counts: Float[Array, "B"]) -> Float[Array, "B"]:
    """``x`` less its group's mean; exactly 0 where the group is all equal and where a row does not count."""
    difference = x - group_mean(x, group, counts)
    return jnp.where((counts > 0) & ~all_equal(x, group, counts), difference, 0.0)


def group_advantages(
    scores: Float[Array, "B"], group: Int[Array, "B"], counts: Float[Array, "B"], options: Advantage
) -> Float[Array, "B"]:
    """``(r - baseline) / scale`` of each response, over the n rows of its group that count.

    Baselines: ``group_mean`` is the mean of the group (GRPO, Shao et al. 2024); ``leave_one_out`` the mean of the n - 1
    others (RLOO, Kool et al. 2019; Ahmadian et al. 2024), which makes ``n / (n - 1)`` of the former. Scales:
    ``group_std`` is ``std + 1e-4`` of the group's scores and ``batch_std`` of all, both with ddof 1.

    A group of equal scores, or with one row that counts, gives 0 with either baseline. Rewards [1, 0, 0, 1] give
    +-.86588 (mean, group_std), +-.5 (mean, none), +-.66667 (leave_one_out, none).

    Args:
      scores: one a row; what stands where ``counts`` is 0, even NaN, does not matter.
      group: number of each row's group, from 0 and below the number of rows; rows may stand in any order.
      counts: 1 for rows that count.
      options: baseline and scale.

    Returns:
      One a row, 0 where ``counts`` is 0.
    """
    advantages = scores if options.baseline == "none" else centred(scores, group, counts)
    if options.baseline == "leave_one_out":
        n = group_sum(counts, group, counts)
        advantages = advantages * n / jnp.maximum(n - 1.0, 1.0)
    if options.scale == "group_std":
        advantages = advantages / (group_std(scores, group, counts) + STD_EPS)
    elif options.scale == "batch_std":
        advantages = advantages / (batch_std(scores, counts) + STD_EPS)
    return jnp.where(counts > 0, advantages, 0.0)


def batch_std(x: Float[Array, "B"], counts: Float[Array, "B"]) -> Float[Array, ""]:
    """The sample standard deviation (ddof 1) of all rows that count; 0 for fewer than two."""
    n = jnp.sum(counts)
    variance = masked_mean(jnp.square(x - masked_mean(x, counts)), counts) * n / jnp.maximum(n - 1.0, 1.0)
    return jnp.sqrt(variance)


def best_of(
    scores: Float[Array, "B"], group: Int[Array, "B"], counts: Float[Array, "B"], keep: int
) -> Float[Array, "B"]:
    """1 for the ``keep`` rows of each group with the highest scores, of those that count; the earlier row of equals.

    Args:
      scores: one a row.
      group: number of each row's group.
      counts: 1 for rows that count.
      keep: how many.
    """
    index = jnp.arange(len(group))
    order = jnp.lexsort((index, -jnp.where(counts > 0, scores, -jnp.inf), group))
    sorted_group = group[order]
    first = jnp.searchsorted(sorted_group, sorted_group, side="left")
    rank = jnp.zeros_like(index).at[order].set(index - first)
    return jnp.where((counts > 0) & (rank < keep), 1.0, 0.0)
