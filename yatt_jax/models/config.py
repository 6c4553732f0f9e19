"""The shape of a decoder, independent of the family its weights come from."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from yatt_jax.models.tower_config import AudioConfig, QwenVisionConfig, SiglipConfig


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) and its context extensions.

    Attributes:
      theta: base of the frequencies.
      kind: "default"; "linear" divides frequencies by ``factor``; "llama3" and "yarn" (Peng et al. 2023) interpolate
        by wavelength.
      factor: how many times the context is stretched.
      original_positions: context length before stretching (llama3, yarn).
      low_freq_factor: llama3: wavelengths above ``original_positions / low_freq_factor`` are divided by ``factor``.
      high_freq_factor: llama3: wavelengths below ``original_positions / high_freq_factor`` are kept.
      beta_fast: yarn: rotations above which a frequency is kept.
      beta_slow: yarn: rotations below which it is divided by ``factor``.
      attention_factor: yarn: multiplies cosine and sine; 1 otherwise.
      truncate: yarn: round the edges of the ramp to whole dimensions.
      sections: how many frequencies turn by time, height and width (Wang et al. 2024, M-RoPE), over and over, where
        tokens have three positions; empty where they have one.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    sections: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of one decoder.

    Attributes:
      vocab: rows of the embedding table.
      hidden: width of the residual stream.
      layers: number of blocks.
      heads: query heads.
      kv_heads: key-value heads; divides ``heads``.
      head_dim: size of a head.
      mlp: width of the gated MLP.
      norm_eps: epsilon of the RMS norms.
      activation: of the MLP's gate.
      tied: whether the output matrix is the embedding table.
      qkv_bias: biases on the query, key and value projections.
      out_bias: bias on the attention output projection.
      mlp_bias: biases in the MLP.
      qk_norm: RMS norm over each head of queries and keys.
      norm_offset: norms multiply by ``1 + weight`` (Gemma) and not by ``weight``.
      post_norms: further norms on the outputs of attention and MLP (Gemma).
      embed_scale: multiplies the embeddings.
      query_scale: multiplies the attention logits.
      windows: sliding window of each layer in tokens, the query itself included; 0 is unlimited.
      ropes: the rotary embeddings used.
      rope_of_layer: index into ``ropes`` of each layer.
      attention_softcap: attention logits become ``cap * tanh(x / cap)``; 0 is off.
      final_softcap: the same for output logits.
      vision: the tower for images and videos; None where the model sees none.
      audio: the tower for sound; None where the model hears none.
      image_spans: tokens of an image see each other, also those that follow.
      dtype: compute dtype; parameters keep their own.
      remat: what the backward pass of a layer recomputes: "none" keeps all, "full" keeps a layer's input alone.
      attention: "auto" is the quickest form for the devices (see ``models.attention``), "plain" the one that needs no
        kernel.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    norm_eps: float = 1e-6
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    tied: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    query_scale: float = 0.0
    windows: tuple[int, ...] = ()
    ropes: tuple[Rope, ...] = (Rope(),)
    rope_of_layer: tuple[int, ...] = ()
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    vision: SiglipConfig | QwenVisionConfig | None = None
    audio: AudioConfig | None = None
    image_spans: bool = False
    dtype: str = "float32"
    remat: Literal["none", "full"] = "none"
    attention: Literal["auto", "plain"] = "auto"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even: rotary embeddings turn pairs")
        object.__setattr__(self, "query_scale", self.query_scale or 1 / math.sqrt(self.head_dim))
        object.__setattr__(self, "windows", self.windows or (0,) * self.layers)
        object.__setattr__(self, "rope_of_layer", self.rope_of_layer or (0,) * self.layers)
        for name in ("windows", "rope_of_layer"):
            if len(getattr(self, name)) != self.layers:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {self.layers} layers")

    @property
    def distinct_windows(self) -> tuple[int, ...]:
        """The windows that layers have, each once."""
        return tuple(sorted(set(self.windows)))

    @property
    def window_of_layer(self) -> tuple[int, ...]:
        """Index into ``distinct_windows`` of each layer."""
        return tuple(self.distinct_windows.index(window) for window in self.windows)
