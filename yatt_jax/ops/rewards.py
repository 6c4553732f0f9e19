"""From one score a response to a reward a token, and which responses are trained at all."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from yatt_jax.ops.masking import whiten
from yatt_jax.ops.options import Finite, NotNegative, check
from yatt_jax.types import Rollout


@dataclasses.dataclass(frozen=True)
class Shaping:
    """What happens to scores on their way into training, in the order of the fields."""

    scale: Finite = 1.0
    clip: NotNegative = 0.0  # limits scaled scores to +-clip; 0: off
    missing_eos: Literal["ignore", "subtract", "replace"] = "ignore"  # for a response cut by the length limit
    missing_eos_value: Finite = 1.0  # what is subtracted from its score, or put in its place
    mask_truncated: bool = False  # leave such a response out of the training
    whiten_scores: bool = False  # divide scores by their standard deviation, keeping their mean
    whiten_tokens: bool = False  # the same with token rewards, after the KL penalty

    def __post_init__(self) -> None:
        check(self)


def trained_rows(rollout: Rollout, rewards: Float[Array, "B"], shaping: Shaping) -> Float[Array, "B"]:
    """1 for rows that losses and statistics see: no padding, a valid reward, and not left out for being cut short."""
    real = jnp.any(rollout.inputs.segments > 0, axis=-1) & jnp.isfinite(rewards)
    return (real & rollout.ended if shaping.mask_truncated else real).astype(jnp.float32)


def shape_scores(
    scores: Float[Array, "B"], counts: Float[Array, "B"], ended: Bool[Array, "B"], shaping: Shaping
) -> Float[Array, "B"]:
    """Scores as training sees them: scaled, then clipped, then the rule for responses cut short, then whitened.

    Args:
      scores: what the rewards gave.
      counts: 1 where a score is valid and takes part in whitening; elsewhere the result is 0.
      ended: whether the response ended by itself.
      shaping: the settings.
    """
    scores = jnp.where(counts > 0, scores, 0.0) * shaping.scale
    if shaping.clip:
        scores = jnp.clip(scores, -shaping.clip, shaping.clip)
    if shaping.missing_eos == "subtract":
        scores = jnp.where(ended, scores, scores - shaping.missing_eos_value)
    elif shaping.missing_eos == "replace":
        scores = jnp.where(ended, scores, shaping.missing_eos_value)
    return whiten(scores, counts, keep_mean=True) if shaping.whiten_scores else jnp.where(counts > 0, scores, 0.0)


def token_rewards(
    scores: Float[Array, "B"], mask: Float[Array, "B T"], penalty: Float[Array, "B T"] | float, shaping: Shaping
) -> Float[Array, "B T"]:
    """``-penalty_t`` at every token that counts, plus the row's score at the last one, whitened if asked.

    A row without such a token has no place for its score, and gets zeros: no index is formed.

    Args:
      scores: one a row.
      mask: 1 at tokens that count.
      penalty: ``beta * kl_t`` where it is charged in the reward, else 0.
      shaping: whether they are whitened.
    """
    from_here = jax.lax.cumsum(mask, axis=1, reverse=True)
    last = (mask > 0) & (from_here == 1)
    rewards = jnp.where(last, scores[:, None], 0.0) - jnp.where(mask > 0, penalty, 0.0)
    return whiten(rewards, mask, keep_mean=True) if shaping.whiten_tokens else rewards
