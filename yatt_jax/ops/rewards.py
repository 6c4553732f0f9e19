"""From one score a response to a reward a token."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from yatt_jax.ops.masking import whiten
from yatt_jax.ops.options import Finite, NotNegative, check


@dataclasses.dataclass(frozen=True)
class Shaping:
    """What happens to a score on its way into training: scale, clip, the rule for a missing EOS, whitening."""

    scale: Finite = 1.0
    clip: NotNegative = 0.0  # limits scaled scores to +-clip; 0: off
    missing_eos: Literal["ignore", "subtract", "replace"] = "ignore"  # for a response cut by the length limit
    missing_eos_value: Finite = 1.0  # what is subtracted from its score, or put in its place
    whiten: bool = False  # divide scores by their standard deviation, keeping their mean

    def __post_init__(self) -> None:
        check(self)


def shape_scores(
    scores: Float[Array, "B"],
    counts: Float[Array, "B"],
    ended: Bool[Array, "B"],
    shaping: Shaping,
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
    return whiten(scores, counts, keep_mean=True) if shaping.whiten else jnp.where(counts > 0, scores, 0.0)


def token_rewards(scores: Float[Array, "B"], mask: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """The row's score at its last token that counts; 0 elsewhere.

    A row without such a token has no place for its score, and gets zeros: no index is formed.

    Args:
      scores: one a row.
      mask: 1 at response tokens.
    """
    from_here = jax.lax.cumsum(mask, axis=1, reverse=True)
    last = (mask > 0) & (from_here == 1)
    return jnp.where(last, scores[:, None], 0.0)
