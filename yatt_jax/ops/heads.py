"""Where the outputs of a scalar head are read."""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from yatt_jax.types import Inputs

OverSteps: TypeAlias = Literal["min", "mean", "product", "last"]


def last_token(inputs: Inputs) -> Int[Array, "*B"]:
    """Index of the last real token of each row; 0 in a row of padding."""
    index = jnp.arange(inputs.segments.shape[-1])
    return jnp.max(jnp.where(inputs.segments > 0, index, 0), axis=-1)


def at_last_token(scores: Float[Array, "*B T Y"], inputs: Inputs) -> Float[Array, "*B Y"]:
    """A reward model's opinion of each row: its outputs at the last real token."""
    return jnp.take_along_axis(scores, last_token(inputs)[..., None, None], axis=-2)[..., 0, :]


def over_steps(scores: Float[Array, "B T"], mask: Float[Array, "B T"], how: OverSteps) -> Float[Array, "B"]:
    """A process reward model's opinion of each row: the probabilities ``sigmoid(score)`` of its steps in one number.

    "min" and "product" are those of Lightman et al. 2023 ("Let's verify step by step", appendix F). With scores of
    probability .9, .5, .8: min .5, mean .7333, product .36, last .8.

    Args:
      scores: outputs at each token.
      mask: 1 at the last token of each step.
      how: what is made of them.

    Returns:
      The numbers; NaN for a row without a step.
    """
    some, count = mask > 0, jnp.sum(mask, axis=-1)
    right = jax.nn.sigmoid(scores)
    if how == "min":
        value = jnp.min(jnp.where(some, right, 1.0), axis=-1)
    elif how == "mean":
        value = jnp.sum(jnp.where(some, right, 0.0), axis=-1) / jnp.maximum(count, 1.0)
    elif how == "product":
        value = jnp.exp(jnp.sum(jnp.where(some, jax.nn.log_sigmoid(scores), 0.0), axis=-1))
    else:
        last = jnp.max(jnp.where(some, jnp.arange(mask.shape[-1]), 0), axis=-1)
        value = jnp.take_along_axis(right, last[:, None], axis=-1)[:, 0]
    return jnp.where(count > 0, value, jnp.nan)
