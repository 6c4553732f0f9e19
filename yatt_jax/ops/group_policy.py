"""Algorithms that train a policy on each response's score against those of its group: they differ in settings alone."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from yatt_jax.ops import actor
from yatt_jax.ops.actor import ActorBatch, ActorHyper
from yatt_jax.ops.groups import Advantage, group_advantages
from yatt_jax.ops.rewards import Shaping
from yatt_jax.types import Metrics, PyTree, Rollout


@dataclasses.dataclass(frozen=True)
class GroupHyper(ActorHyper):
    """Their settings; each gives its own defaults."""

    reward: Shaping = Shaping()
    advantage: Advantage = Advantage()


def check(hyper: GroupHyper, samples_per_prompt: int) -> list[str]:
    """Why a run with so many responses to a prompt would learn nothing; empty if it can."""
    return hyper.advantage.faults(samples_per_prompt)


def prepare(
    rollout: Rollout,
    rewards: Float[Array, "B"],
    scores: dict[str, PyTree],
    hyper: GroupHyper,
    kl_coef: Float[Array, ""],
) -> tuple[ActorBatch, Metrics]:
    """Gives all tokens of a response its score, less what it pays for divergence and length, against its group's."""
    rows = actor.scored(rollout, rewards, scores, hyper, hyper.reward, kl_coef)
    advantages = group_advantages(rows.net_rewards, rollout.group, rows.trained, hyper.advantage)
    return actor.make_batch(rollout, rows, advantages[:, None] * rows.mask, kl_coef)
