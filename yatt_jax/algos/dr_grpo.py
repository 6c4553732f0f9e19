"""Dr. GRPO (Liu et al. 2025, "Understanding R1-zero-like training"): GRPO without its two biases.

The advantage is the reward less the group's mean, not divided by a standard deviation, which would favour prompts that
are nearly solved or nearly hopeless; token losses are divided by a constant length, not by the response's own, which
would let long wrong responses off lightly. There is no reference.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from yatt_jax.ops import actor, options
from yatt_jax.ops.actor import OldLogprobs
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.correction import Correction
from yatt_jax.ops.groups import Advantage, group_advantages
from yatt_jax.ops.kl import KlPenalty
from yatt_jax.ops.options import Count, NotNegative
from yatt_jax.ops.policy import Clip
from yatt_jax.ops.rewards import Shaping
from yatt_jax.types import Metrics, PyTree, Rollout

SCORED_BY, TRAINS = ("actor", "reference"), ("actor",)
Batch = actor.ActorBatch
LOSSES = {"actor": actor.loss}
scored_by, trains = actor.scored_by, actor.trains


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Settings of Dr. GRPO."""

    kl: KlPenalty = KlPenalty(place="none")
    reward: Shaping = Shaping()
    advantage: Advantage = Advantage(scale="none")
    clip: Clip = Clip()
    aggregation: Aggregation = Aggregation("fixed_length", 1024)  # any constant; the longest response is usual
    correction: Correction = Correction()
    old_logprobs: OldLogprobs = "scored"
    entropy_coef: NotNegative = 0.0
    epochs: Count = 1
    minibatches: Count = 1  # in one epoch
    target_kl: NotNegative = 0.0  # kl_update (nats a token) above which the rest of a step is dropped; 0: off

    def __post_init__(self) -> None:
        options.check(self, *actor.rules(self))


def check(hyper: Hyper, samples_per_prompt: int) -> list[str]:
    """Why a run with so many responses to a prompt would learn nothing; empty if it can."""
    return hyper.advantage.faults(samples_per_prompt)


def prepare(
    rollout: Rollout, rewards: Float[Array, "B"], scores: dict[str, PyTree], hyper: Hyper, kl_coef: Float[Array, ""]
) -> tuple[Batch, Metrics]:
    """Each response's reward less the mean of its group."""
    rows = actor.scored(rollout, rewards, scores, hyper, hyper.reward, kl_coef)
    advantages = group_advantages(rows.net_rewards, rollout.group, rows.trained, hyper.advantage)
    return actor.make_batch(rollout, rows, advantages[:, None] * rows.mask, kl_coef)
