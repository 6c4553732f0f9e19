"""The audio tower: log-mel frames in, features in the width of the decoder out.

Source: the encoder of Whisper (Radford et al. 2023), as Qwen2-Audio (Chu et al. 2024) and Qwen2.5-Omni (Xu et al. 2025)
use it: two convolutions halve the frames, the stack of blocks sees them both ways, and a feature is a mean of two.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.encoder import Encoder, norm
from yatt_jax.models.layers import ACTIVATIONS, Projection, constant, weight
from yatt_jax.parallel.partition import constrain
from yatt_jax.types import Frames


class Convolution(nnx.Module):
    """A convolution over three frames, zeros beyond both ends: ``y[t] = sum_i x[stride t + i - 1] W[i] + b``."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        self.stride = stride
        self.kernel = weight((3, inputs, outputs), (None, None, "embed"), 1 / math.sqrt(3 * inputs))
        self.bias = constant(0.0, (outputs,), ("embed",))

    def __call__(self, x_CNF: Float[Array, "C N F"]) -> Float[Array, "C M D"]:
        """Every ``stride``-th output, in the dtype of x."""
        y = jax.lax.conv_general_dilated(
            x_CNF,
            self.kernel[...].astype(x_CNF.dtype),
            (self.stride,),
            ((1, 1),),
            dimension_numbers=("NWC", "WIO", "NWC"),
        )
        return y + self.bias[...].astype(x_CNF.dtype)


def sinusoids(positions: int, size: int) -> np.ndarray:
    """Whisper's positions ``[positions, size]``: sines of geometric frequencies from 1 to 1/10000, then cosines."""
    frequency = np.exp(-np.log(10000.0) / (size // 2 - 1) * np.arange(size // 2, dtype=np.float32)).astype(np.float32)
    angle = np.arange(positions, dtype=np.float32)[:, None] * frequency
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)


class AudioTower(nnx.Module):
    """Whisper's encoder, and a map to the decoder of means of two positions.

    Where a chunk is a whole sound, its convolutions read what is given after its end, two frames at most: the silence
    that the processor pads it with. Chunks of fixed size are padded with zeros here.
    """

    def __init__(self, config: DecoderConfig):
        assert config.audio is not None
        audio = self.config = config.audio
        D = audio.encoder.hidden
        self.dtype = config.dtype
        self.first = Convolution(audio.bins, D, 1)
        self.second = Convolution(D, D, 2)
        self.places = None if audio.chunk else weight((audio.positions, D), (None, "embed"), 0.02)
        self.encoder = Encoder(audio.encoder, config.remat, config.attention)
        self.norm = norm(D, audio.encoder)
        self.project = Projection((D,), (config.hidden,), (None, "embed"), bias=True)
        # Begin and end of a sound: in checkpoints, and used by no model.
        self.ends = weight((2, config.hidden), (None, "embed"), 0.02) if audio.chunk else None

    def __call__(self, frames: Frames) -> Float[Array, "S N D"]:
        """Features in the compute dtype, one for four frames of each chunk, chunk after chunk."""
        S, C, N, F = frames.mels.shape
        x = constrain(frames.mels.astype(self.dtype).reshape(S * C, N, F), "rows", None, None)
        lengths = frames.lengths.reshape(S * C, 1)
        real = (jnp.arange(N) < lengths)[..., None]
        gelu = ACTIVATIONS["gelu"]
        if self.places is None:
            x = jnp.where(real, gelu(self.first(jnp.where(real, x, 0))), 0)
            places = jnp.asarray(sinusoids(N // 2, x.shape[-1]))
        else:
            x = gelu(self.first(x))
            places = jax.lax.stop_gradient(self.places[...])[: N // 2]  # as they were made, never trained
        x = gelu(self.second(x)) + places.astype(x.dtype)
        heard = jnp.arange(N // 2) < (lengths + 1) // 2
        x = self.encoder(x, heard.astype(jnp.int32))
        x = jnp.mean(x.reshape(S, C * (N // 4), 2, -1), axis=2)
        return self.project(self.norm(x))
