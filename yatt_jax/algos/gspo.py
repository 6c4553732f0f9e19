"""Group sequence policy optimisation (Zheng et al. 2025): GRPO with one importance ratio a response.

The ratio is the geometric mean of the tokens' ratios, and is clipped as one; it varies far less than a token's, so the
clip is narrow. Several minibatches a step give it something to correct.
"""

from __future__ import annotations

import dataclasses

from yatt_jax.ops import actor, group_policy
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.group_policy import GroupHyper
from yatt_jax.ops.kl import KlPenalty
from yatt_jax.ops.policy import Clip

TRAINS = ("actor",)
Batch, LOSSES = actor.ActorBatch, {"actor": actor.loss}
scored_by, trains = actor.scored_by, actor.trains
check, prepare = group_policy.check, group_policy.prepare


@dataclasses.dataclass(frozen=True)
class Hyper(GroupHyper):
    """Settings of GSPO."""

    kl: KlPenalty = KlPenalty(place="none")
    clip: Clip = Clip(low=3e-4, high=4e-4, level="sequence_mean")
    aggregation: Aggregation = Aggregation("sequence_mean")
