"""Where the outputs of a scalar head are read."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from yatt_jax.types import Inputs


def last_token(inputs: Inputs) -> Int[Array, "*B"]:
    """Index of the last real token of each row; 0 in a row of padding."""
    index = jnp.arange(inputs.segments.shape[-1])
    return jnp.max(jnp.where(inputs.segments > 0, index, 0), axis=-1)


def at_last_token(scores: Float[Array, "*B T Y"], inputs: Inputs) -> Float[Array, "*B Y"]:
    """A reward model's opinion of each row: its outputs at the last real token."""
    return jnp.take_along_axis(scores, last_token(inputs)[..., None, None], axis=-2)[..., 0, :]
