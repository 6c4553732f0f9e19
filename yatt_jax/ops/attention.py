"""Attention: what a query sees, and the plain form that every faster one equals.

The other forms are ``attention_blocks`` (CPUs), ``attention_splash`` and ``attention_cache`` (TPUs) and
``attention_cudnn`` (GPUs); ``models.attention`` chooses among them.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

HIDDEN = -1e30  # the logit of a key that a query does not see


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Queries and keys are the tokens of rows; a token sees the tokens of its segment up to itself.

    Attributes:
      segments: document number of each token in its row; 0 is padding, which sees nothing.
      spans: tokens of one span (of one segment) also see those that follow in it, as Gemma 3 does within an image; 0
        is none. Windows hide what lies before, never what follows.
      causal: where False, a token sees its whole segment, as encoders do.
    """

    segments: Int[Array, "B T"]
    spans: Int[Array, "B T"] | None = None
    causal: bool = dataclasses.field(default=True, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cached:
    """Queries are the newest tokens of rows whose keys lie in a cache: token t of row b sees places up to start + t.

    Attributes:
      start: place of each row's first query. One at or past the end of the cache sees nothing.
      layer: which layer of the cache.
      places_last: keys are ``[L, B, J, K, S]`` and not ``[L, B, J, S, K]``: on a CPU the logits of a decode step take
        half the time so. Values are ``[L, B, J, S, K]`` in any case.
    """

    start: Int[Array, "B"]
    layer: Int[Array, ""]
    places_last: bool = dataclasses.field(default=False, metadata={"static": True})


Seen: TypeAlias = Packed | Cached


def visible(seen: Seen, queries: int, keys: int, window: int | Int[Array, ""]) -> Bool[Array, "B T S"]:
    """Which keys each query sees, with a window of so many tokens (itself included) where it is not 0."""
    index, place = jnp.arange(queries), jnp.arange(keys)
    if isinstance(seen, Packed):
        segments = seen.segments
        ahead = (index[:, None] - place)[None]
        same = _equal(segments, segments)
        before = (ahead >= 0) | (not seen.causal)
        if seen.spans is not None:
            before |= _equal(seen.spans, seen.spans)
    else:
        at = seen.start[:, None, None] + index[None, :, None]
        ahead, same = at - place, at < keys
        before = ahead >= 0
    return same & before & ((ahead < window) | (jnp.asarray(window) == 0))


def _equal(of_q: Int[Array, "B T"], of_k: Int[Array, "B S"]) -> Bool[Array, "B T S"]:
    """Which numbers agree; 0 agrees with none."""
    return (of_q[:, :, None] == of_k[:, None, :]) & (of_q[:, :, None] > 0)


def plain(
    q_BTHK: Float[Array, "B T H K"],
    keys: Array,
    values: Array,
    seen: Seen,
    *,
    window: int | Int[Array, ""],
    scale: float,
    softcap: float,
) -> Float[Array, "B T H K"]:
    """Grouped-query attention (Ainslie et al. 2023): ``softmax(cap(scale q k)) v`` over the keys that a query sees.

    Args:
      q_BTHK: queries.
      keys: of packed rows ``[B, J, T, K]``; of a cache all its layers, as ``Cached`` says.
      values: the same.
      seen: what is visible.
      window: sliding window in tokens, 0 for none.
      scale: multiplies the logits.
      softcap: logits become ``softcap * tanh(x / softcap)``; 0 is off.

    Returns:
      Outputs in the dtype of the queries; zeros, never NaN, for a query that sees nothing.
    """
    B, T, H, K = q_BTHK.shape
    places_last = isinstance(seen, Cached) and seen.places_last
    if isinstance(seen, Cached):
        keys, values = (
            jax.lax.dynamic_index_in_dim(x, seen.layer, keepdims=False).astype(q_BTHK.dtype) for x in (keys, values)
        )
    J, S = values.shape[1:3]
    G = H // J
    # The G queries of a head are rows of one product: twice as fast on a CPU as a product for each.
    q_BJRK = q_BTHK.reshape(B, T, J, G, K).transpose(0, 2, 3, 1, 4).reshape(B, J, G * T, K)
    product = "bjrk,bjks->bjrs" if places_last else "bjrk,bjsk->bjrs"
    logits = jnp.einsum(product, q_BJRK, keys, preferred_element_type=jnp.float32) * scale
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    mask_BTS = visible(seen, T, S, window)
    logits = jnp.where(mask_BTS[:, None, None], logits.reshape(B, J, G, T, S), HIDDEN)
    # The result does not depend on what is subtracted, and a gradient through the maximum costs a pass over the logits.
    weights = jnp.exp(logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum(
        "bjrs,bjsk->bjrk",
        weights.reshape(B, J, G * T, S).astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    out = out.reshape(B, J, G, T, K) / total
    out = jnp.where(jnp.any(mask_BTS, axis=-1)[:, None, None, :, None], out, 0.0)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, K).astype(q_BTHK.dtype)
