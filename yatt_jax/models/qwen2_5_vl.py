"""Qwen2.5-VL: images and videos of any size, and rotary embeddings that turn by time, row and column (M-RoPE)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from yatt_jax.models import names, qwen2, tower_names
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.hf_config import ACTIVATION_KEYS, ConfigError, HfConfig
from yatt_jax.models.tower_config import EncoderConfig, QwenVisionConfig

# What transformers assumes where a key is missing.
_TEXT_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1e6}
_SECTIONS = (16, 24, 24)
# Keys beside which older folders have those of the text.
_OUTER = {"architectures", "vision_config", "image_token_id", "video_token_id", "model_type", "tie_word_embeddings"}
_OUTER |= {"vision_start_token_id", "vision_end_token_id", "vision_token_id"}


def from_hf(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder and tower that a config.json describes.

    Raises:
      ConfigError: a switch that is not supported, or a malformed value; the message names the key.
    """
    if "text_config" not in values:
        text = {key: value for key, value in values.items() if key not in _OUTER}
        values = {key: value for key, value in values.items() if key in _OUTER} | {"text_config": text}
    config = HfConfig(values)
    text = config.part("text_config")
    tied = config.get("tie_word_embeddings", False) or bool(text.get("tie_word_embeddings", False))
    vision = read_vision(
        config,
        token=config.size("image_token_id", 151655),
        video_token=config.size("video_token_id", 151656),
        rate="tokens_per_second",
    )
    for key in ("vision_start_token_id", "vision_end_token_id", "vision_token_id"):
        config.get(key, None)
    config.finish()
    return dataclasses.replace(read_text(_TEXT_DEFAULTS | text), tied=tied, vision=vision)


def read_text(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder of a ``text_config``: Qwen2's with M-RoPE.

    Raises:
      ConfigError: sections that are not those of a head, or as ``qwen2.from_hf``.
    """
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = dict(values.get(key) or {})
    sections = tuple(rope.pop("mrope_section", _SECTIONS))
    for name in ("rope_type", "type"):
        if rope.get(name) == "mrope":
            rope[name] = "default"
    result = qwen2.from_hf({**values, key: rope, "model_type": "qwen2"})
    if len(sections) % 3 or sum(sections) != result.head_dim // 2:
        raise ConfigError(
            f"config key text_config.{key}.mrope_section = {list(sections)}: times, rows and columns turn the "
            f"{result.head_dim // 2} pairs of a head of size {result.head_dim}, and these add up to {sum(sections)}"
        )
    return dataclasses.replace(result, ropes=(dataclasses.replace(result.ropes[0], sections=sections),))


def read_vision(
    outer: HfConfig, *, token: int, video_token: int, rate: str | float, omni: bool = False
) -> QwenVisionConfig:
    """The tower of ``vision_config``.

    Args:
      outer: the whole config.
      token: placeholder of a feature of an image.
      video_token: the same of a video.
      rate: temporal positions a second, or the key that says it.
      omni: Qwen2.5-Omni's, whose queries, keys and values are tensors of their own, and whose videos take time.

    Raises:
      ConfigError: as ``from_hf``.
    """
    config = HfConfig(outer.part("vision_config", {}), "vision_config")
    patch, merge = config.size("patch_size", 14), config.size("spatial_merge_size", 2)
    window = config.size("window_size", 112)
    if window < patch * merge:
        raise ConfigError(f"config key vision_config.window_size = {window}: a feature has {patch * merge} pixels")
    rope = {"rope_type": "axial", **config.get("rope_parameters", {})}
    if rope["rope_type"] != "axial":
        kind = rope["rope_type"]
        raise ConfigError(f"config key vision_config.rope_parameters.rope_type = {kind!r}: only 'axial' is supported")
    # Older folders repeat sizes under further names.
    config.require_off("spatial_patch_size", (patch,), f"it differs from patch_size = {patch}")
    channels = config.size("in_channels", config.get("in_chans", 3))
    encoder = EncoderConfig(
        hidden=config.size("hidden_size", 3584),
        layers=config.size("depth", 32),
        heads=config.size("num_heads", 16),
        mlp=config.size("intermediate_size", 3420),
        norm="rms",
        activation=config.activation("hidden_act", "silu"),
        gated=True,
        fused=not omni,
        whole=tuple(config.get("fullatt_block_indexes", (7, 15, 23, 31))),
    )
    result = QwenVisionConfig(
        encoder,
        token=token,
        video_token=video_token,
        merge=merge,
        window=window // merge // patch,
        patch=patch,
        temporal=config.size("temporal_patch_size", 2),
        channels=channels,
        theta=float(rope.get("rope_theta", 1e4)),
        rate=float(config.get(rate, 4) if isinstance(rate, str) else rate),
        after_time=omni,
    )
    for key in ("out_hidden_size", "tokens_per_second", "embed_dim"):
        config.get(key, None)
    config.finish()
    return result


def write_vision(config: DecoderConfig) -> dict[str, Any]:
    """The ``vision_config`` of a model; its type and rate are the family's to add."""
    vision = config.vision
    if not isinstance(vision, QwenVisionConfig):
        raise ConfigError("this family needs the vision tower of Qwen2.5-VL")
    encoder = vision.encoder
    return {
        "hidden_size": encoder.hidden,
        "depth": encoder.layers,
        "num_heads": encoder.heads,
        "intermediate_size": encoder.mlp,
        "hidden_act": ACTIVATION_KEYS[encoder.activation],
        "fullatt_block_indexes": list(encoder.whole or range(encoder.layers)),
        "out_hidden_size": config.hidden,
        "patch_size": vision.patch,
        "spatial_merge_size": vision.merge,
        "temporal_patch_size": vision.temporal,
        "window_size": vision.window * vision.merge * vision.patch,
        "in_channels": vision.channels,
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.theta},
    }


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder and its tower; ``families.to_hf`` checks that it says all."""
    vision = write_vision(config)
    assert isinstance(config.vision, QwenVisionConfig)
    return {
        "text_config": {"model_type": "qwen2_5_vl_text", **qwen2.to_hf(config)},
        "vision_config": {"model_type": "qwen2_5_vl_vision", "tokens_per_second": round(config.vision.rate), **vision},
        "image_token_id": config.vision.token,
        "video_token_id": config.vision.video_token,
        "tie_word_embeddings": config.tied,
    }


FAMILY = names.Family(
    model_type="qwen2_5_vl",
    architectures={
        "lm": "Qwen2_5_VLForConditionalGeneration",
        "value": "Qwen2_5_VLForTokenClassification",
        "reward": "Qwen2_5_VLForSequenceClassification",
    },
    from_hf=from_hf,
    to_hf=to_hf,
    not_stock=("value", "reward"),
    names=(
        *names.under(qwen2.FAMILY.names, "model.", "model.", "model.language_model."),
        *names.under(tower_names.qwen_vision("decoder/vision", "qkv"), "", "visual.", "model.visual."),
    ),
)
