"""Attention over packed rows on GPUs: cuDNN through ``jax.nn.dot_product_attention``, forward and backward."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from yatt_jax.ops.attention import Packed, visible


def cudnn(
    q_BTHK: Float[Array, "B T H K"],
    k_BJTK: Float[Array, "B J T K"],
    v_BJTK: Float[Array, "B J T K"],
    seen: Packed,
    *,
    window: int,
    scale: float,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T H K"]:
    """``attention.plain`` for packed rows without a soft cap, with a window known at compile time.

    cuDNN skips what the diagonal and the window hide. Segments reach it as a bias of one number for a pair of tokens,
    shared by the heads. It is given whole pairs of tokens: its gradient with a bias takes no odd length.
    """
    T = q_BTHK.shape[1]
    pad = T % 2
    q = jnp.pad(q_BTHK, ((0, 0), (0, pad), (0, 0), (0, 0)))
    k, v = (jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (k_BJTK, v_BJTK))
    segments = jnp.pad(seen.segments, ((0, 0), (0, pad)))
    # Padding sees padding, as softmax must see something; its outputs are set to zero below.
    same = segments[:, None, :, None] == segments[:, None, None, :]
    causal = seen.causal and seen.spans is None
    if seen.spans is not None:
        spans = jnp.pad(seen.spans, ((0, 0), (0, pad)))
        same &= visible(Packed(segments + 1, spans), T + pad, T + pad, window)[:, None]
        window = 0
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=same,
        scale=scale,
        is_causal=causal,
        local_window_size=(window - 1, 0 if causal else T + pad) if window else None,
        implementation=implementation,
    )
    return jnp.where((seen.segments > 0)[:, :, None, None], out[:, :T], 0)
