"""From one score a response to a reward a token, and which responses are trained at all."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from yatt_jax.ops.masking import whiten
from yatt_jax.ops.options import CountOrZero, Finite, NotNegative, check
from yatt_jax.types import Rollout


@dataclasses.dataclass(frozen=True)
class Shaping:
    """What happens to scores on their way into training, in the order of the fields."""

    scale: Finite = 1.0
    clip: NotNegative = 0.0  # limits scaled scores to +-clip; 0: off
    overlong_limit: CountOrZero = 0  # tokens at which a response costs 1, see ``overlong_penalty``; 0: off
    overlong_cache: CountOrZero = 0  # tokens before the limit over which the price rises to that
    missing_eos: Literal["ignore", "subtract", "replace"] = "ignore"  # for a response cut by the length limit
    missing_eos_value: Finite = 1.0  # what is subtracted from its score, or put in its place
    mask_truncated: bool = False  # leave such a response out of the training
    whiten_scores: bool = False  # divide scores by their standard deviation, keeping their mean

    def __post_init__(self) -> None:
        limit, cache = self.overlong_limit, self.overlong_cache
        fits = 0 < cache <= limit if limit else not cache
        check(self, (fits, f"overlong_cache = {cache}: from 1 to overlong_limit = {limit}, or 0 with no limit"))


def trained_rows(rollout: Rollout, rewards: Float[Array, "B"], mask_truncated: bool) -> Float[Array, "B"]:
    """1 for rows that losses and statistics see: no padding, a valid reward, and not left out for being cut short."""
    real = jnp.any(rollout.inputs.segments > 0, axis=-1) & jnp.isfinite(rewards)
    return (real & rollout.ended if mask_truncated else real).astype(jnp.float32)


def overlong_penalty(lengths: Float[Array, "B"], limit: int, cache: int) -> Float[Array, "B"]:
    """``clip((limit - cache - length) / cache, -1, 0)``: 0 up to ``limit - cache`` tokens, then falling to -1.

    Source: Yu et al. 2025 (DAPO), equation 13. With limit 100 and cache 20: 70 tokens 0, 90 tokens -.5, 100 tokens -1.

    Args:
      lengths: tokens of each response.
      limit: length of the full penalty.
      cache: over how many tokens it comes about, at least 1.
    """
    return jnp.clip((limit - cache - lengths) / cache, -1.0, 0.0)


def shape_scores(
    scores: Float[Array, "B"],
    counts: Float[Array, "B"],
    ended: Bool[Array, "B"],
    lengths: Float[Array, "B"],
    shaping: Shaping,
) -> Float[Array, "B"]:
    """Scores as training sees them: scaled, clipped, less the price of length, the missing-EOS rule, whitened.

    Args:
      scores: what the rewards gave.
      counts: 1 where a score is valid and takes part in whitening; elsewhere the result is 0.
      ended: whether the response ended by itself.
      lengths: its tokens.
      shaping: the settings.
    """
    scores = jnp.where(counts > 0, scores, 0.0) * shaping.scale
    if shaping.clip:
        scores = jnp.clip(scores, -shaping.clip, shaping.clip)
    if shaping.overlong_limit:
        scores = scores + overlong_penalty(lengths, shaping.overlong_limit, shaping.overlong_cache)
    if shaping.missing_eos == "subtract":
        scores = jnp.where(ended, scores, scores - shaping.missing_eos_value)
    elif shaping.missing_eos == "replace":
        scores = jnp.where(ended, scores, shaping.missing_eos_value)
    return whiten(scores, counts, keep_mean=True) if shaping.whiten_scores else jnp.where(counts > 0, scores, 0.0)


def token_rewards(
    scores: Float[Array, "B"], mask: Float[Array, "B T"], penalty: Float[Array, "B T"] | float, *, whitened: bool
) -> Float[Array, "B T"]:
    """``-penalty_t`` at every token that counts, plus the row's score at the last one, whitened if asked.

    A row without such a token has no place for its score, and gets zeros: no index is formed.

    Args:
      scores: one a row.
      mask: 1 at tokens that count.
      penalty: ``beta * kl_t`` where it is charged in the reward, else 0.
      whitened: divide by their standard deviation over all tokens, keeping their mean.
    """
    from_here = jax.lax.cumsum(mask, axis=1, reverse=True)
    last = (mask > 0) & (from_here == 1)
    rewards = jnp.where(last, scores[:, None], 0.0) - jnp.where(mask > 0, penalty, 0.0)
    return whiten(rewards, mask, keep_mean=True) if whitened else rewards
