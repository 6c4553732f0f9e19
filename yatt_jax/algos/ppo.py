"""Proximal policy optimisation of a language model against a reward (Schulman et al. 2017; Ziegler et al. 2019)."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float

from yatt_jax.ops import actor
from yatt_jax.ops.actor import ActorBatch, ActorHyper
from yatt_jax.ops.advantages import gae
from yatt_jax.ops.aggregate import aggregate
from yatt_jax.ops.masking import masked_ratio, whiten
from yatt_jax.ops.metrics import critic_metrics
from yatt_jax.ops.options import Count, CountOrZero, NotNegative, Share
from yatt_jax.ops.policy import value_loss
from yatt_jax.ops.rewards import Shaping, token_rewards
from yatt_jax.types import Metrics, PyTree, Ratio, Rollout, Values

TRAINS = ("critic", "actor")


@dataclasses.dataclass(frozen=True)
class Hyper(ActorHyper):
    """Settings of PPO."""

    reward: Shaping = Shaping()
    whiten_rewards: bool = False  # divide token rewards by their standard deviation, after the KL, keeping their mean
    gamma: Share = 1.0
    lam: Share = 0.95
    value_clip: NotNegative = 0.2  # 0: off
    whiten_advantages: bool = True  # over tokens, to mean 0
    epochs: Count = 4
    critic_warmup_steps: CountOrZero = 0  # first steps, in which the critic alone is trained


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch(ActorBatch):
    """Rows to train on, with what the critic's loss needs beside the actor's.

    Attributes:
      old_values: the critic's, before the step.
      returns: what its values are fitted to.
    """

    old_values: Float[Array, "B T"]
    returns: Float[Array, "B T"]


def check(hyper: Hyper, samples_per_prompt: int) -> list[str]:
    """Nothing is compared within groups: any number of responses to a prompt will do."""
    del hyper, samples_per_prompt
    return []


def scored_by(hyper: Hyper) -> tuple[str, ...]:
    """Roles whose scores ``prepare`` needs."""
    return (*actor.scored_by(hyper), "critic")


def trains(hyper: Hyper, step: int) -> tuple[str, ...]:
    """Roles that are updated in a step, in order."""
    return ("critic",) if step < hyper.critic_warmup_steps else TRAINS


def prepare(
    rollout: Rollout, rewards: Float[Array, "B"], scores: dict[str, PyTree], hyper: Hyper, kl_coef: Float[Array, ""]
) -> tuple[Batch, Metrics]:
    """Advantages and returns of a rollout. A row whose reward is NaN is left out of losses and statistics."""
    critic: Values = scores["critic"]
    rows = actor.scored(rollout, rewards, scores, hyper, hyper.reward, kl_coef)
    per_token = token_rewards(rows.rewards, rows.mask, rows.penalty, whitened=hyper.whiten_rewards)
    advantages, returns = gae(per_token, critic.values, rows.mask, gamma=hyper.gamma, lam=hyper.lam)
    used = whiten(advantages, rows.mask) if hyper.whiten_advantages else advantages
    policy, metrics = actor.make_batch(rollout, rows, used, kl_coef)
    batch = Batch(**vars(policy), old_values=critic.values, returns=returns)
    return batch, metrics | critic_metrics(critic, advantages, returns, rows.mask)


def critic_loss(outputs: Values, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """Clipped squared error against the returns."""
    mask = batch.response_mask
    loss, clipped = value_loss(outputs.values, batch.old_values, batch.returns, hyper.value_clip)
    total = aggregate(loss, mask, hyper.aggregation)
    return total, {"value_loss": total, "value_clip_fraction": masked_ratio(clipped, mask)}


LOSSES = {"actor": actor.loss, "critic": critic_loss}
