"""Qwen2 and Qwen2.5: biases on queries, keys and values; optional windows on the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yatt_jax.models import names
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.hf_config import (
    HfConfig,
    activation_key,
    common_fields,
    common_keys,
    read_rope,
    upper_windows,
    window_keys,
    write_rope,
)


def from_hf(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes.

    Raises:
      ConfigError: a switch that is not supported, or a malformed value; the message names the key.
    """
    config = HfConfig(values)
    heads = config.size("num_attention_heads")
    result = DecoderConfig(
        **common_fields(config),
        kv_heads=config.size("num_key_value_heads", 32 if "num_key_value_heads" not in values else heads),
        head_dim=config.size("head_dim", config.size("hidden_size") // heads),
        activation=config.activation("hidden_act", "silu"),
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=True,
        windows=upper_windows(config),
        ropes=(read_rope(config),),
    )
    config.finish()
    return result


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder; ``families.to_hf`` checks that it says all."""
    keys = {**common_keys(config), **window_keys(config), **write_rope(config.ropes[0])}
    return {**keys, "hidden_act": activation_key(config)}


FAMILY = names.Family(
    model_type="qwen2",
    architectures={
        "lm": "Qwen2ForCausalLM",
        "value": "Qwen2ForTokenClassification",
        "reward": "Qwen2ForSequenceClassification",
    },
    from_hf=from_hf,
    to_hf=to_hf,
    names=(
        *names.TRANSFORMER,
        *names.MLP_NORM,
        *names.QKV_BIAS,
        *names.HEADS,
    ),
)
