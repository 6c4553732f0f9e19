"""The stack of blocks that vision and audio towers share: tokens see each other both ways.

As in the decoder, blocks have stacked parameters and are run by a scan; which layers see windows is data it reads.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from yatt_jax.models.attention import attend
from yatt_jax.models.layers import MLP, FeedForward, LayerNorm, Projection, RMSNorm, rotate
from yatt_jax.models.tower_config import EncoderConfig
from yatt_jax.ops.attention import Packed
from yatt_jax.parallel.partition import constrain

Angles = tuple[Float[Array, "S P F"], Float[Array, "S P F"]]  # cosines and sines


def norm(size: int, config: EncoderConfig) -> LayerNorm | RMSNorm:
    """A norm of the kind that the tower has."""
    return (LayerNorm if config.norm == "layer" else RMSNorm)(size, config.norm_eps)


class EncoderAttention(nnx.Module):
    """Attention of one layer."""

    def __init__(self, config: EncoderConfig, form: Literal["auto", "plain"]):
        D, H = config.hidden, config.heads
        K = D // H
        self.form: Literal["auto", "plain"] = form
        self.scale = K**-0.5
        if config.fused:
            # Checkpoints hold the three behind one another, which leaves no dimension to cut by heads.
            self.qkv = Projection((D,), (3, H, K), ("embed", None, None, None), bias=True)
        else:
            self.q = Projection((D,), (H, K), ("embed", "heads", None), bias=True)
            self.k = Projection((D,), (H, K), ("embed", "heads", None), bias=config.key_bias)
            self.v = Projection((D,), (H, K), ("embed", "heads", None), bias=True)
        self.fused = config.fused
        self.o = Projection((H, K), (D,), ("heads", None, "embed"), bias=True)

    def __call__(self, x: jax.Array, segments: jax.Array, angles: Angles | None) -> jax.Array:
        """Outputs ``[S, P, D]``; zeros plus the bias at padding."""
        q, k, v = jnp.moveaxis(self.qkv(x), 2, 0) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (constrain(y, "rows", None, "act_heads", None) for y in (q, k, v))
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        out = attend(
            q,
            k.transpose(0, 2, 1, 3),
            v.transpose(0, 2, 1, 3),
            Packed(segments, causal=False),
            windows=(0,),
            which=0,
            scale=self.scale,
            softcap=0.0,
            form=self.form,
        )
        return self.o(constrain(out, "rows", None, "act_heads", None))


class EncoderBlock(nnx.Module):
    """Attention and MLP with their norms and residual connections."""

    def __init__(self, config: EncoderConfig, form: Literal["auto", "plain"]):
        self.attention_norm = norm(config.hidden, config)
        self.attention = EncoderAttention(config, form)
        self.mlp_norm = norm(config.hidden, config)
        if config.gated:
            self.mlp = MLP(config.hidden, config.mlp, config.activation, bias=True)
        else:
            self.mlp = FeedForward(config.hidden, config.mlp, config.hidden, config.activation)

    def __call__(self, x: jax.Array, segments: jax.Array, angles: Angles | None) -> jax.Array:
        """The residual stream after the block."""
        x = x + self.attention(self.attention_norm(x), segments, angles)
        x = x + self.mlp(self.mlp_norm(x))
        return constrain(x, "rows", None, None)


class Encoder(nnx.Module):
    """The stack, without a norm at its end.

    Args:
      config: sizes and switches.
      remat: see ``DecoderConfig.remat``.
      form: of attention, see ``DecoderConfig.attention``.
    """

    def __init__(self, config: EncoderConfig, remat: Literal["none", "full"], form: Literal["auto", "plain"]):
        self.config = config
        self.remat = remat
        self.layers = nnx.vmap(lambda: EncoderBlock(config, form), out_axes=0, axis_size=config.layers)()

    def __call__(
        self,
        x: Float[Array, "S P D"],
        segments: Int[Array, "S P"],
        windows: Int[Array, "S P"] | None = None,
        angles: Angles | None = None,
    ) -> Float[Array, "S P D"]:
        """Runs the stack.

        Args:
          x: embeddings of patches or frames, in the compute dtype.
          segments: what a token sees where the layer sees all; 0 is padding.
          windows: what it sees in the other layers; may be None where there are none.
          angles: of rotary embeddings.
        """
        whole = self.config.whole if windows is not None else None
        sees_whole = (
            np.ones(self.config.layers, bool) if whole is None else np.isin(np.arange(self.config.layers), whole)
        )
        graph, stacked = nnx.split(self.layers)

        def step(x: jax.Array, xs: tuple[nnx.State, jax.Array]) -> tuple[jax.Array, None]:
            params, sees_whole = xs
            own = segments if windows is None or whole is None else jnp.where(sees_whole, segments, windows)
            return nnx.merge(graph, params)(x, own, angles), None

        if self.remat == "full":
            step = jax.checkpoint(step, prevent_cse=False)
        x, _ = jax.lax.scan(step, constrain(x, "rows", None, None), (stacked, jnp.asarray(sees_whole)))
        return x
