"""Qwen3: norms on queries and keys, a head size of its own; optional windows on the upper layers."""

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
    bias = config.get("attention_bias", False)
    result = DecoderConfig(
        **common_fields(config),
        kv_heads=config.size("num_key_value_heads", 32 if "num_key_value_heads" not in values else heads),
        head_dim=config.size("head_dim", 128),
        activation=config.activation("hidden_act", "silu"),
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        windows=upper_windows(config),
        ropes=(read_rope(config),),
    )
    config.finish()
    return result


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder; ``families.to_hf`` checks that it says all."""
    keys = {**common_keys(config), **window_keys(config), **write_rope(config.ropes[0])}
    return {**keys, "hidden_act": activation_key(config), "attention_bias": config.qkv_bias}


FAMILY = names.Family(
    model_type="qwen3",
    architectures={
        "lm": "Qwen3ForCausalLM",
        "value": "Qwen3ForTokenClassification",
        "reward": "Qwen3ForSequenceClassification",
    },
    from_hf=from_hf,
    to_hf=to_hf,
    names=(
        *names.TRANSFORMER,
        *names.MLP_NORM,
        *names.QKV_BIAS,
        *names.OUT_BIAS,
        *names.QK_NORM,
        *names.HEADS,
    ),
)
