"""Choosing the next token: filters over the vocabulary, an exact draw, and the support that survived, as bits."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt8


def pack_kept(kept: Bool[Array, "*B V"]) -> UInt8[Array, "*B V8"]:
    """Packs a mask over the vocabulary into bytes: entry v is bit ``v % 8`` (little-endian) of byte ``v // 8``.

    The last byte is filled with zeros, so ``V8 = ceil(V / 8)``.
    """
    missing = -kept.shape[-1] % 8
    bits = jnp.pad(kept, [(0, 0)] * (kept.ndim - 1) + [(0, missing)]).reshape(*kept.shape[:-1], -1, 8)
    # The eight terms are distinct bits: their sum is their union and stays within a byte.
    return jnp.sum(bits.astype(jnp.uint8) << jnp.arange(8, dtype=jnp.uint8), axis=-1, dtype=jnp.uint8)


def unpack_kept(kept: UInt8[Array, "*B V8"], vocab: int) -> Bool[Array, "*B V"]:
    """The mask over the vocabulary that ``pack_kept`` packed.

    Args:
      kept: bytes, ``ceil(vocab / 8)`` on the last axis.
      vocab: number of vocabulary entries.

    Raises:
      ValueError: a last axis that does not fit the vocabulary.
    """
    if kept.shape[-1] != -(-vocab // 8):
        raise ValueError(
            f"kept has {kept.shape[-1]} bytes on its last axis, and a vocabulary of {vocab} takes {-(-vocab // 8)}"
        )
    bits = (kept[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & jnp.uint8(1)
    return bits.reshape(*kept.shape[:-1], -1)[..., :vocab] != 0
