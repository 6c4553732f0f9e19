"""REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, "Back to basics").

A response is one action: its reward, less the divergence of all its tokens, is compared with the mean of the other
responses to its prompt, and its importance ratio is that of the whole response.
"""

from __future__ import annotations

import dataclasses

from yatt_jax.ops import actor, group_policy
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.group_policy import GroupHyper
from yatt_jax.ops.groups import Advantage
from yatt_jax.ops.policy import Clip

TRAINS = ("actor",)
Batch, LOSSES = actor.ActorBatch, {"actor": actor.loss}
scored_by, trains = actor.scored_by, actor.trains
check, prepare = group_policy.check, group_policy.prepare


@dataclasses.dataclass(frozen=True)
class Hyper(GroupHyper):
    """Settings of RLOO."""

    advantage: Advantage = Advantage("leave_one_out", scale="none")
    clip: Clip = Clip(level="sequence_product")
    aggregation: Aggregation = Aggregation("sequence_mean")
