"""Attention over packed rows on TPUs: the splash kernel of ``jax.experimental.pallas.ops.tpu``, forward and backward.

The kernel never holds the logits and skips the blocks that lie past the diagonal or outside the window. It takes whole
blocks, so rows are padded to them, and it knows no query that sees nothing, so the outputs of padding are set to zero.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as library
from jaxtyping import Array, Float

from yatt_jax.ops.attention import Packed

# Sides of a block, best first: large ones keep the matrix unit busy, small ones waste less on padding.
_SIDES = (512, 256, 128)
_MOST_PADDING = 1 / 8


def side_of_blocks(length: int) -> int:
    """Side of the blocks for rows of so many tokens: the largest that pads them by at most an eighth."""
    fitting = [side for side in _SIDES if -length % side <= _MOST_PADDING * length]
    return fitting[0] if fitting else _SIDES[-1]


def splash(
    q_BTHK: Float[Array, "B T H K"],
    k_BJTK: Float[Array, "B J T K"],
    v_BJTK: Float[Array, "B J T K"],
    seen: Packed,
    *,
    window: int,
    scale: float,
    softcap: float,
    interpret: bool = False,
) -> Float[Array, "B T H K"]:
    """``attention.plain`` for packed rows without spans, with the same arguments but a window known at compile time.

    ``interpret`` runs the kernel's program on any platform, slowly.
    """
    T, H = q_BTHK.shape[1:3]
    side = side_of_blocks(T)
    pad = -T % side
    q_BHTK = jnp.pad((q_BTHK * scale).transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, pad), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (k_BJTK, v_BJTK))
    segments = jnp.pad(seen.segments, ((0, 0), (0, pad)))
    kernel = _kernel(T + pad, H, side, window, softcap, seen.causal, interpret)
    out: Any = jax.vmap(kernel)(q_BHTK, k, v, library.SegmentIds(segments, segments))
    out = out.transpose(0, 2, 1, 3)[:, :T]
    return jnp.where((seen.segments > 0)[:, :, None, None], out, 0)


def _kernel(length: int, heads: int, side: int, window: int, softcap: float, causal: bool, interpret: bool):
    shape = length, length
    whole = library.CausalMask(shape) if causal else library.FullMask(shape)
    mask = library.LocalMask(shape, (window - 1, 0 if causal else None), 0) if window else whole
    sides = library.BlockSizes(
        block_q=side,
        block_kv=side,
        block_q_dkv=side,
        block_kv_dkv=side,
        block_q_dq=side,
        block_kv_dq=side,
    )
    make = functools.partial(library.make_splash_mha_single_device, interpret=interpret)
    return make(library.MultiHeadMask([mask] * heads), block_sizes=sides, attn_logits_soft_cap=softcap or None)
