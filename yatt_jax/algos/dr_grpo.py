"""Dr. GRPO (Liu et al. 2025, "Understanding R1-zero-like training"): GRPO without its two biases.

The advantage is the reward less the group's mean, not divided by a standard deviation, which would favour prompts that
are nearly solved or nearly hopeless; token losses are divided by a constant length, not by the response's own, which
would let long wrong responses off lightly. There is no reference.
"""

from __future__ import annotations

import dataclasses

from yatt_jax.ops import actor, group_policy
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.group_policy import GroupHyper
from yatt_jax.ops.groups import Advantage
from yatt_jax.ops.kl import KlPenalty

TRAINS = ("actor",)
Batch, LOSSES = actor.ActorBatch, {"actor": actor.loss}
scored_by, trains = actor.scored_by, actor.trains
check, prepare = group_policy.check, group_policy.prepare


@dataclasses.dataclass(frozen=True)
class Hyper(GroupHyper):
    """Settings of Dr. GRPO."""

    kl: KlPenalty = KlPenalty(place="none")
    advantage: Advantage = Advantage(scale="none")
    aggregation: Aggregation = Aggregation("fixed_length", 1024)  # any constant; the longest response is usual
