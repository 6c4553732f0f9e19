"""Mistral: Llama's shape with a sliding window on every layer (Jiang et al. 2023)."""

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
    # Null is "no window"; a missing key is the architecture's 4096.
    window = config.optional("sliding_window", 4096) or 0
    kind = "sliding_attention" if window else "full_attention"
    layers = config.size("num_hidden_layers")
    config.require_off(
        "layer_types", ([kind] * layers,), f"a mistral with this sliding_window has {kind} on every layer"
    )
    result = DecoderConfig(
        **common_fields(config),
        kv_heads=config.size("num_key_value_heads", 8),
        head_dim=config.size("head_dim", config.size("hidden_size") // config.size("num_attention_heads")),
        activation=config.activation("hidden_act", "silu"),
        tied=config.get("tie_word_embeddings", False),
        windows=(window,) * layers,
        ropes=(read_rope(config),),
    )
    config.finish()
    return result


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder; ``families.to_hf`` checks that it says all."""
    return {
        **common_keys(config),
        "hidden_act": activation_key(config),
        "sliding_window": config.windows[0] or None,
        **write_rope(config.ropes[0]),
    }


FAMILY = names.Family(
    model_type="mistral",
    architectures={
        "lm": "MistralForCausalLM",
        "value": "MistralForTokenClassification",
        "reward": "MistralForSequenceClassification",
    },
    from_hf=from_hf,
    to_hf=to_hf,
    names=(
        *names.TRANSFORMER,
        *names.MLP_NORM,
        *names.HEADS,
    ),
)
