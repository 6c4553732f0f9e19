"""Sums and means over the tokens that count, and where tokens stand in their rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from yatt_jax.types import Ratio


def masked_sum(x: Float[Array, "*B"], mask: Float[Array, "*B"], axis: int | None = None) -> Float[Array, "..."]:
    """``sum(x)`` where the mask is not 0; what stands elsewhere, even NaN, does not matter."""
    return jnp.sum(jnp.where(mask > 0, x, 0.0), axis=axis)


def masked_ratio(x: Float[Array, "*B"], mask: Float[Array, "*B"]) -> Ratio:
    """The mean of x where the mask is 1, as sum and weight."""
    return Ratio(masked_sum(x, mask), jnp.sum(mask, dtype=jnp.float32))


def masked_mean(x: Float[Array, "*B"], mask: Float[Array, "*B"], axis: int | None = None) -> Float[Array, "..."]:
    """``sum(x mask) / sum(mask)`` along an axis (all by default), and 0 where nothing counts."""
    count = jnp.sum(mask, axis=axis)
    return masked_sum(x, mask, axis) / jnp.maximum(count, 1.0)


def whiten(
    x: Float[Array, "*B"], mask: Float[Array, "*B"], *, keep_mean: bool = False, eps: float = 1e-8
) -> Float[Array, "*B"]:
    """``(x - mean) / sqrt(var + eps)`` over what counts, plus the mean again if it is kept; 0 elsewhere.

    The variance is the population's (ddof 0), so that one token gives 0 and not NaN.
    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences".
    """
    mean = masked_mean(x, mask)
    centred = jnp.where(mask > 0, x - mean, 0.0)
    white = centred * jax.lax.rsqrt(masked_mean(centred * centred, mask) + eps)
    return jnp.where(mask > 0, white + mean, 0.0) if keep_mean else white


def segments_from_lengths(lengths: Int[Array, "*B"], size: int) -> Int[Array, "*B T"]:
    """Segment ids of rows that hold one document from index 0: 1 up to the row's length, 0 (padding) after it."""
    return (jnp.arange(size) < lengths[..., None]).astype(jnp.int32)


def positions_from_segments(segments: Int[Array, "*B T"]) -> Int[Array, "*B T"]:
    """The running count of tokens within each segment, from 0; 0 at padding. Padding may stand on either side."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[-1]), segments.shape)
    begins = segments != jnp.roll(segments, 1, axis=-1)
    begins = begins.at[..., 0].set(True)
    start = jax.lax.cummax(jnp.where(begins, index, 0), axis=segments.ndim - 1)
    return jnp.where(segments > 0, index - start, 0)
