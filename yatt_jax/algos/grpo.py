"""Group relative policy optimisation (Shao et al. 2024, "DeepSeekMath"): responses to one prompt are the baseline.

The score of a response, less the mean of its group and divided by the group's standard deviation, is the advantage of
all its tokens; every response weighs the same; the divergence from the reference is charged in the loss by k3.
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
    """Settings of GRPO."""

    kl: KlPenalty = KlPenalty(place="loss", estimator="k3", coef=0.04)
    reward: Shaping = Shaping()
    advantage: Advantage = Advantage()
    clip: Clip = Clip()
    aggregation: Aggregation = Aggregation("sequence_mean")
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
    """Each response's reward against its group's, in units of the group's standard deviation."""
    rows = actor.scored(rollout, rewards, scores, hyper, hyper.reward, kl_coef)
    advantages = group_advantages(rows.net_rewards, rollout.group, rows.trained, hyper.advantage)
    return actor.make_batch(rollout, rows, advantages[:, None] * rows.mask, kl_coef)
