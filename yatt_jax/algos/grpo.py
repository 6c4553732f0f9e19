"""Group relative policy optimisation (Shao et al. 2024, "DeepSeekMath"): responses to one prompt are the baseline.

The score of a response, less the mean of its group and divided by the group's standard deviation, is the advantage of
all its tokens; every response weighs the same; the divergence from the reference is charged in the loss by k3.
"""

from __future__ import annotations

import dataclasses

from yatt_jax.ops import actor, group_policy
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.group_policy import GroupHyper
from yatt_jax.ops.kl import KlPenalty

TRAINS = ("actor",)
Batch, LOSSES = actor.ActorBatch, {"actor": actor.loss}
scored_by, trains = actor.scored_by, actor.trains
check, prepare = group_policy.check, group_policy.prepare


@dataclasses.dataclass(frozen=True)
class Hyper(GroupHyper):
    """Settings of GRPO."""

    kl: KlPenalty = KlPenalty(place="loss", estimator="k3", coef=0.04)
    aggregation: Aggregation = Aggregation("sequence_mean")
