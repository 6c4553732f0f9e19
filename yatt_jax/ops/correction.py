"""Weights for rows that another policy sampled: stale weights, or a sampler whose numbers differ from the trainer's."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from yatt_jax.ops.masking import masked_ratio
from yatt_jax.ops.options import Positive, check
from yatt_jax.ops.policy import Level, at_level
from yatt_jax.types import Metrics


@dataclasses.dataclass(frozen=True)
class Correction:
    """Truncated importance weights on the policy's loss; see ``importance_weights``."""

    how: Literal["off", "truncate", "mask"] = "off"
    level: Level = "token"  # whether each token has a weight, or all of a response share one
    limit: Positive = 2.0  # C

    def __post_init__(self) -> None:
        check(self)


def importance_weights(
    trainer: Float[Array, "*B T"], sampler: Float[Array, "*B T"], mask: Float[Array, "*B T"], options: Correction
) -> tuple[Float[Array, "*B T"], Metrics]:
    """``w = exp(log pi_trainer - log pi_sampler)``, held below C: ``min(w, C)``, or 0 where ``w > C`` ("mask").

    Sources: Espeholt et al. 2018 (IMPALA, truncated weights); Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training" (between sampler and trainer).

    Args:
      trainer: log-probabilities under the policy that is about to be trained, before its first update.
      sampler: under the policy that drew the tokens.
      mask: 1 at tokens that count.
      options: how, at which level, and C.

    Returns:
      The weights, 0 where the mask is 0, and ``correction_mean`` (of the weights) and ``correction_cut`` (share of
      tokens beyond C).
    """
    weights = jnp.exp(at_level(trainer - sampler, mask, options.level))
    cut = weights > options.limit
    held = jnp.where(cut, 0.0 if options.how == "mask" else options.limit, weights)
    held = jnp.where(mask > 0, held, 0.0)
    metrics: Metrics = {
        "correction_mean": masked_ratio(held, mask),
        "correction_cut": masked_ratio(cut.astype(jnp.float32), mask),
    }
    return held, metrics
