"""Vision towers: patches in, features in the width of the decoder out.

Sources: SigLIP (Zhai et al. 2023) as Gemma 3 uses it (Gemma Team 2025), Qwen2.5-VL (Bai et al. 2025).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.encoder import Angles, Encoder, norm
from yatt_jax.models.layers import FeedForward, Projection, RMSNorm, weight
from yatt_jax.models.tower_config import QwenVisionConfig, SiglipConfig
from yatt_jax.types import Patches


class SiglipTower(nnx.Module):
    """SigLIP, and a map to the decoder of means over squares of patches.

    Args:
      vision: sizes.
      config: the decoder.
    """

    def __init__(self, vision: SiglipConfig, config: DecoderConfig):
        D = vision.encoder.hidden
        self.config, self.dtype = vision, config.dtype
        self.patch = Projection(vision.patch_shape, (D,), (None, None, None, "embed"), bias=True)
        self.places = weight((vision.side**2, D), (None, "embed"), D**-0.5)
        self.encoder = Encoder(vision.encoder, config.remat, config.attention)
        self.norm = norm(D, vision.encoder)
        self.feature_norm = RMSNorm(D, vision.encoder.norm_eps, offset=True)
        self.project = Projection((D,), (config.hidden,), (None, "embed"), bias=False)

    def __call__(self, patches: Patches) -> Float[Array, "S N D"]:
        """Features in the compute dtype, one for ``merge**2`` patches."""
        vision = self.config
        S, P = patches.segments.shape
        x = self.patch(patches.pixels.astype(self.dtype).reshape(S, P, *vision.patch_shape))
        place = patches.places[..., 0] * vision.side + patches.places[..., 1]
        x = x + jnp.take(self.places[...], place, axis=0).astype(x.dtype)
        x = self.norm(self.encoder(x, patches.segments))
        x = jnp.mean(x.reshape(S, P // vision.merge**2, vision.merge**2, -1), axis=2)
        return self.project(self.feature_norm(x))


class QwenVisionTower(nnx.Module):
    """The tower of Qwen2.5-VL: rotary rows and columns, windows in most layers, an MLP over squares of patches.

    Args:
      vision: sizes.
      config: the decoder.
    """

    def __init__(self, vision: QwenVisionConfig, config: DecoderConfig):
        D = vision.encoder.hidden
        self.config, self.dtype = vision, config.dtype
        self.patch = Projection(vision.patch_shape, (D,), (None, None, None, None, "embed"), bias=False)
        self.encoder = Encoder(vision.encoder, config.remat, config.attention)
        self.norm = norm(D, vision.encoder)
        wide = D * vision.merge**2
        self.merge = FeedForward(wide, wide, config.hidden, "gelu")

    def __call__(self, patches: Patches) -> Float[Array, "S N D"]:
        """Features in the compute dtype, one for ``merge**2`` patches."""
        vision = self.config
        S, P = patches.segments.shape
        x = self.patch(patches.pixels.astype(self.dtype).reshape(S, P, *vision.patch_shape))
        x = self.norm(self.encoder(x, patches.segments, patches.windows, self._angles(patches)))
        return self.merge(x.reshape(S, P // vision.merge**2, -1))

    def _angles(self, patches: Patches) -> Angles:
        """Rows turn the first half of a head's pairs, columns the second, with the same frequencies."""
        size = self.config.encoder.hidden // self.config.encoder.heads // 2
        frequency = 1.0 / (np.float32(self.config.theta) ** (np.arange(0, size, 2, dtype=np.float32) / size))
        angle = patches.places[..., None].astype(jnp.float32) * frequency
        angle = angle.reshape(*angle.shape[:2], -1)
        return jnp.cos(angle), jnp.sin(angle)


def vision_tower(config: DecoderConfig) -> SiglipTower | QwenVisionTower | None:
    """The tower that a model sees with; None where it sees nothing."""
    if config.vision is None:
        return None
    if isinstance(config.vision, SiglipConfig):
        return SiglipTower(config.vision, config)
    return QwenVisionTower(config.vision, config)
