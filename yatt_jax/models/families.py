"""The model families, by the ``model_type`` of their config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from yatt_jax.models import gemma3, gemma3_vision, llama, mistral, qwen2, qwen2_5_omni, qwen2_5_vl, qwen2_audio, qwen3
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.hf_config import ConfigError
from yatt_jax.models.names import Family

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (llama, mistral, qwen2, qwen3, gemma3, gemma3_vision, qwen2_5_vl, qwen2_audio, qwen2_5_omni)
}


def family(model_type: Any) -> Family:
    """The family of a model type.

    Raises:
      ConfigError: an unknown type; the message lists the known ones.
    """
    if model_type not in FAMILIES:
        raise ConfigError(f"config key model_type = {model_type!r} is not supported; {', '.join(FAMILIES)} are")
    return FAMILIES[model_type]


def own(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a folder's config.json that describes what is read of it: all, but for one of several models."""
    if values.get("model_type") == "qwen2_5_omni":
        return qwen2_5_omni.thinker(values)
    return dict(values)


def from_hf(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes.

    Raises:
      ConfigError: an unknown ``model_type``, an unsupported switch or a malformed value; the message names the key.
    """
    return family(values.get("model_type")).from_hf(values)


def to_hf(model_type: str, config: DecoderConfig, max_positions: int = 2048) -> dict[str, Any]:
    """The config.json of a decoder that was made here and not read from a folder.

    Args:
      model_type: family to write it as.
      config: the decoder.
      max_positions: longest sequence it is meant for.

    Raises:
      ConfigError: the family has no way to say what the decoder is; the message names the fields.
    """
    chosen = family(model_type)
    values = {
        "model_type": model_type,
        "architectures": [chosen.architectures["lm"]],
        "max_position_embeddings": max_positions,
        **chosen.to_hf(config),
    }
    if "text_config" in values:
        values["text_config"]["max_position_embeddings"] = values.pop("max_position_embeddings")
    how = {"dtype": config.dtype, "remat": config.remat, "attention": config.attention}
    back = dataclasses.replace(chosen.from_hf(values), **how)
    if back != config:
        lost = [f.name for f in dataclasses.fields(config) if getattr(back, f.name) != getattr(config, f.name)]
        raise ConfigError(f"a {model_type} config cannot express this decoder: {', '.join(lost)} would change")
    return values
