"""Llama 1 to 3 and what shares their shape (SmolLM2, TinyLlama, Vicuna)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yatt_jax.models import names
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.hf_config import HfConfig, activation_key, common_fields, common_keys, read_rope, write_rope


def from_hf(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes.

    Raises:
      ConfigError: a switch that is not supported, or a malformed value; the message names the key.
    """
    config = HfConfig(values)
    bias = config.get("attention_bias", False)
    result = DecoderConfig(
        **common_fields(config),
        kv_heads=config.size("num_key_value_heads", config.size("num_attention_heads")),
        head_dim=config.size("head_dim", config.size("hidden_size") // config.size("num_attention_heads")),
        activation=config.activation("hidden_act", "silu"),
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.get("mlp_bias", False),
        ropes=(read_rope(config),),
    )
    config.finish()
    return result


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder; ``families.to_hf`` checks that it says all."""
    return {
        **common_keys(config),
        "hidden_act": activation_key(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        **write_rope(config.ropes[0]),
    }


FAMILY = names.Family(
    model_type="llama",
    architectures={
        "lm": "LlamaForCausalLM",
        "value": "LlamaForTokenClassification",
        "reward": "LlamaForSequenceClassification",
    },
    from_hf=from_hf,
    to_hf=to_hf,
    names=(
        *names.TRANSFORMER,
        *names.MLP_NORM,
        *names.QKV_BIAS,
        *names.OUT_BIAS,
        *names.MLP_BIAS,
        *names.HEADS,
    ),
)
