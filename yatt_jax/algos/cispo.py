"""CISPO (MiniMax 2025, "MiniMax-M1"): clipped importance weights on the plain policy gradient.

The ratio is a constant weight, clipped from above; every token keeps its gradient, also those whose ratio a clipped
surrogate would cut off. Every token weighs the same.
"""

from __future__ import annotations

import dataclasses

from yatt_jax.ops import actor, group_policy
from yatt_jax.ops.group_policy import GroupHyper
from yatt_jax.ops.kl import KlPenalty
from yatt_jax.ops.policy import Clip

TRAINS = ("actor",)
Batch, LOSSES = actor.ActorBatch, {"actor": actor.loss}
scored_by, trains = actor.scored_by, actor.trains
check, prepare = group_policy.check, group_policy.prepare


@dataclasses.dataclass(frozen=True)
class Hyper(GroupHyper):
    """Settings of CISPO."""

    kl: KlPenalty = KlPenalty(place="none")
    clip: Clip = Clip(low=1.0, high=4.0, how="weight")  # weights up to 5, and none raised
