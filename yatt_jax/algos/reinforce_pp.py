"""REINFORCE++ (Hu 2025): PPO's token rewards and clip without a critic; advantages are normalised over the batch.

A token's advantage is the discounted sum of the rewards from it on (the divergence at every token, the score at the
last), whitened over all tokens of the step. The variant with a baseline takes the mean of its group off each score
first, for prompts of unequal difficulty.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxtyping import Array, Float

from yatt_jax.ops import actor
from yatt_jax.ops.actor import ActorHyper
from yatt_jax.ops.advantages import returns_to_go
from yatt_jax.ops.groups import centred, group_faults
from yatt_jax.ops.kl import KlPenalty
from yatt_jax.ops.masking import whiten
from yatt_jax.ops.options import Share
from yatt_jax.ops.rewards import Shaping, token_rewards
from yatt_jax.types import Metrics, PyTree, Rollout

TRAINS = ("actor",)
Batch = actor.ActorBatch
LOSSES = {"actor": actor.loss}
scored_by, trains = actor.scored_by, actor.trains


@dataclasses.dataclass(frozen=True)
class Hyper(ActorHyper):
    """Settings of REINFORCE++."""

    kl: KlPenalty = KlPenalty(coef=0.01)
    reward: Shaping = Shaping()
    baseline: Literal["none", "group_mean"] = "none"  # taken off the scores first
    gamma: Share = 1.0


def check(hyper: Hyper, samples_per_prompt: int) -> list[str]:
    """Why a run with so many responses to a prompt would learn nothing; empty if it can."""
    if hyper.baseline == "none":
        return []
    return group_faults(samples_per_prompt, f"config.hyper.baseline = {hyper.baseline!r}")


def prepare(
    rollout: Rollout, rewards: Float[Array, "B"], scores: dict[str, PyTree], hyper: Hyper, kl_coef: Float[Array, ""]
) -> tuple[Batch, Metrics]:
    """Discounted sums of token rewards, whitened over the tokens of all rows."""
    rows = actor.scored(rollout, rewards, scores, hyper, hyper.reward, kl_coef)
    own = rows.rewards if hyper.baseline == "none" else centred(rows.rewards, rollout.group, rows.trained)
    per_token = token_rewards(own, rows.mask, rows.penalty, whitened=False)
    advantages = whiten(returns_to_go(per_token, rows.mask, hyper.gamma), rows.mask)
    return actor.make_batch(rollout, rows, advantages, kl_coef)
