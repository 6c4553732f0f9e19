"""A short name for the exact values of a tree, to tell whether weights are those that they were."""

from __future__ import annotations

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from yatt_jax.io.checkpoint_arrays import describe, flatten
from yatt_jax.types import PyTree

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def fingerprint(tree: PyTree) -> str:
    """16 hexadecimal digits that name, dtype, shape and every bit of each array go into.

    Sums modulo 2**32 of the elements' bits, weighted by their places: computed where the arrays lie, and the same for
    every sharding. It finds accidents, such as a folder of weights that was replaced; it is no defence against intent.

    Args:
      tree: arrays of elements of at most 32 bits.
    """
    flat = flatten(tree)
    sums = [np.asarray(_sums(x)).tolist() for x in flat.values()]
    facts = [[name, *about, total] for (name, about), total in zip(describe(flat).items(), sums, strict=True)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@jax.jit
def _sums(x: jax.Array) -> UInt32[Array, "2"]:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    # Odd weights, so that no single bit's change is lost; two sets of them, so that hardly any pair of changes is.
    weights = (
        place * jnp.uint32(0x9E3779B1) | jnp.uint32(1),
        (place ^ jnp.uint32(0x85EBCA77)) * jnp.uint32(2) + jnp.uint32(1),
    )
    return jnp.stack([jnp.sum(bits * weight, dtype=jnp.uint32) for weight in weights])
