"""Proximal policy optimisation of a language model against a reward (Schulman et al. 2017; Ziegler et al. 2019)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from yatt_jax.ops.advantages import gae
from yatt_jax.ops.aggregate import Aggregation, aggregate
from yatt_jax.ops.kl import KlPenalty, kl
from yatt_jax.ops.masking import masked_ratio, whiten
from yatt_jax.ops.metrics import critic_metrics, rollout_metrics
from yatt_jax.ops.options import Count, CountOrZero, NotNegative, Share, check
from yatt_jax.ops.policy import Clip, surrogate, value_loss
from yatt_jax.ops.rewards import Shaping, shape_scores, token_rewards, trained_rows
from yatt_jax.types import Inputs, Logprobs, Metrics, PyTree, Ratio, Rollout, Values

SCORED_BY, TRAINS = ("actor", "reference", "critic"), ("critic", "actor")


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Settings of PPO."""

    kl: KlPenalty = KlPenalty()
    reward: Shaping = Shaping()
    clip: Clip = Clip()
    aggregation: Aggregation = Aggregation()  # of both losses
    gamma: Share = 1.0
    lam: Share = 0.95
    value_clip: NotNegative = 0.2  # 0: off
    entropy_coef: NotNegative = 0.0
    whiten_advantages: bool = True  # over tokens, to mean 0
    epochs: Count = 4
    minibatches: Count = 1  # in one epoch
    critic_warmup_steps: CountOrZero = 0  # first steps, in which the critic alone is trained
    target_kl: NotNegative = 0.0  # kl_update (nats a token) above which the rest of a step is dropped; 0: off

    def __post_init__(self) -> None:
        check(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows to train on. ``response_mask`` is 1 at the tokens that are trained; rows of zeros weigh nothing."""

    inputs: Inputs
    response_mask: Float[Array, "B T"]
    kept: UInt8[Array, "B T V8"] | None
    old_logprobs: Float[Array, "B T"]
    reference_logprobs: Float[Array, "B T"] | None
    old_values: Float[Array, "B T"]
    advantages: Float[Array, "B T"]
    returns: Float[Array, "B T"]
    kl_coef: Float[Array, "B"]


def scored_by(hyper: Hyper) -> tuple[str, ...]:
    """Roles whose scores ``prepare`` needs."""
    return tuple(role for role in SCORED_BY if role != "reference" or hyper.kl.place != "none")


def trains(hyper: Hyper, step: int) -> tuple[str, ...]:
    """Roles that are updated in a step, in order."""
    return ("critic",) if step < hyper.critic_warmup_steps else TRAINS


def prepare(
    rollout: Rollout, rewards: Float[Array, "B"], scores: dict[str, PyTree], hyper: Hyper, kl_coef: Float[Array, ""]
) -> tuple[Batch, Metrics]:
    """Advantages and returns of a rollout. A row whose reward is NaN is left out of losses and statistics."""
    actor, reference, critic = scores["actor"], scores.get("reference"), scores["critic"]
    trained = trained_rows(rollout, rewards, hyper.reward)
    mask = rollout.response_mask * trained[:, None]
    shaped = shape_scores(rewards, trained, rollout.ended, hyper.reward)
    charged = hyper.kl.place == "reward"
    penalty = kl_coef * kl(actor.logprobs, scores["reference"].logprobs, hyper.kl.estimator) if charged else 0.0
    per_token = token_rewards(shaped, mask, penalty, hyper.reward)
    advantages, returns = gae(per_token, critic.values, mask, gamma=hyper.gamma, lam=hyper.lam)
    batch = Batch(
        inputs=rollout.inputs,
        response_mask=mask,
        kept=rollout.kept,
        old_logprobs=actor.logprobs,
        reference_logprobs=scores["reference"].logprobs if hyper.kl.place == "loss" else None,
        old_values=critic.values,
        advantages=whiten(advantages, mask) if hyper.whiten_advantages else advantages,
        returns=returns,
        kl_coef=jnp.full(rewards.shape, kl_coef),
    )
    metrics = rollout_metrics(rollout, rewards, shaped, trained, actor, reference)
    return batch, metrics | critic_metrics(critic, advantages, returns, mask)


def actor_loss(outputs: Logprobs, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """Clipped surrogate, less the entropy bonus, plus the divergence if it is charged in the loss."""
    mask = batch.response_mask
    loss, metrics = surrogate(outputs.logprobs, batch.old_logprobs, batch.advantages, mask, hyper.clip)
    metrics |= {"policy_loss": aggregate(loss, mask, hyper.aggregation), "entropy": masked_ratio(outputs.entropy, mask)}
    if hyper.entropy_coef:
        loss = loss - hyper.entropy_coef * outputs.entropy
    if batch.reference_logprobs is not None:
        divergence = kl(outputs.logprobs, batch.reference_logprobs, hyper.kl.estimator)
        loss = loss + batch.kl_coef[:, None] * divergence
    return aggregate(loss, mask, hyper.aggregation), metrics


def critic_loss(outputs: Values, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """Clipped squared error against the returns."""
    mask = batch.response_mask
    loss, clipped = value_loss(outputs.values, batch.old_values, batch.returns, hyper.value_clip)
    total = aggregate(loss, mask, hyper.aggregation)
    return total, {"value_loss": total, "value_clip_fraction": masked_ratio(clipped, mask)}


LOSSES = {"actor": actor_loss, "critic": critic_loss}
