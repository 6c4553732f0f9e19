"""DAPO (Yu et al. 2025): GRPO for long reasoning, without a reference.

The clip is wider above than below, so that rare tokens can grow; every token weighs the same; a response near the
length limit pays a price that rises with its length (``reward.overlong_limit`` and ``overlong_cache``, in tokens: give
them the run's own lengths). Its fourth part, drawing prompts until enough groups have a signal, is ``rollout.dynamic``.
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
    """Settings of DAPO."""

    kl: KlPenalty = KlPenalty(place="none")
    clip: Clip = Clip(high=0.28)
