"""On-policy distillation: the policy learns from a teacher's opinion of what it wrote itself (Agarwal et al. 2024).

The loss is the reverse divergence KL(policy || teacher) on the policy's own samples, as a policy gradient: each token's
reward is ``log pi_teacher - log pi``. With ``gamma`` 0 a token answers for itself alone (Lu et al. 2025, "On-policy
distillation"); with 1 for the rest of the response as well, which is the exact gradient of the sequence's divergence.
Rewards train nothing here: they are reported, and mark invalid rows.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from yatt_jax.ops import actor
from yatt_jax.ops.actor import ActorHyper
from yatt_jax.ops.advantages import returns_to_go
from yatt_jax.ops.kl import KlPenalty, kl
from yatt_jax.ops.masking import masked_ratio
from yatt_jax.ops.options import Share
from yatt_jax.ops.rewards import Shaping
from yatt_jax.types import Metrics, PyTree, Rollout

TRAINS = ("actor",)
Batch = actor.ActorBatch
LOSSES = {"actor": actor.loss}
trains = actor.trains


@dataclasses.dataclass(frozen=True)
class Hyper(ActorHyper):
    """Settings of on-policy distillation."""

    kl: KlPenalty = KlPenalty(place="none")  # from a frozen reference, beside the teacher
    mask_truncated: bool = False  # leave responses cut by the length limit out of the training
    gamma: Share = 0.0


def check(hyper: Hyper, samples_per_prompt: int) -> list[str]:
    """Nothing is compared within groups: any number of responses to a prompt will do."""
    del hyper, samples_per_prompt
    return []


def scored_by(hyper: Hyper) -> tuple[str, ...]:
    """Roles whose scores ``prepare`` needs."""
    return (*actor.scored_by(hyper), "teacher")


def prepare(
    rollout: Rollout, rewards: Float[Array, "B"], scores: dict[str, PyTree], hyper: Hyper, kl_coef: Float[Array, ""]
) -> tuple[Batch, Metrics]:
    """What the teacher thinks of each token, less what the policy thought.

    Returns:
      The batch; facts about the rollout, with ``teacher_kl`` and ``teacher_kl_k3`` (nats a token).
    """
    shaping = Shaping(mask_truncated=hyper.mask_truncated)
    rows = actor.scored(rollout, rewards, scores, hyper, shaping, kl_coef)
    teacher = scores["teacher"].logprobs
    apart = kl(rows.old_logprobs, teacher, "k1")
    advantages = returns_to_go(-(apart + rows.penalty) * rows.mask, rows.mask, hyper.gamma)
    batch, metrics = actor.make_batch(rollout, rows, advantages, kl_coef)
    metrics["teacher_kl"] = masked_ratio(apart, rows.mask)
    metrics["teacher_kl_k3"] = masked_ratio(kl(rows.old_logprobs, teacher, "k3"), rows.mask)
    return batch, metrics
