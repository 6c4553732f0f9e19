"""Gemma 3, text only: windows on most layers with a rotary embedding of their own, norms on both sides of each part."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from yatt_jax.models import names
from yatt_jax.models.config import DecoderConfig, Rope
from yatt_jax.models.hf_config import (
    ConfigError,
    HfConfig,
    activation_key,
    check_layer_types,
    common_fields,
    common_keys,
    parse_rope,
    write_rope,
)


def from_hf(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes.

    Raises:
      ConfigError: a switch that is not supported, or a malformed value; the message names the key.
    """
    config = HfConfig(values)
    bias = config.get("attention_bias", False)
    config.require_off("use_bidirectional_attention", (False,), "only causal attention can be built")
    if config.get("attn_logit_softcapping", None):
        warnings.warn(
            "config key attn_logit_softcapping is not followed: stock implementations of gemma3_text do not apply it",
            stacklevel=2,
        )
    kinds = _layer_types(config)
    window = config.optional("sliding_window", 4096)
    if not window and "sliding_attention" in kinds:
        raise ConfigError(
            f"config key sliding_window = {window!r}: layer_types has sliding_attention, which needs a size"
        )
    result = DecoderConfig(
        **common_fields(config),
        kv_heads=config.size("num_key_value_heads", 4),
        head_dim=config.size("head_dim", 256),
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        tied=config.get("tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        norm_offset=True,
        post_norms=True,
        embed_scale=math.sqrt(config.size("hidden_size")),
        query_scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        ropes=_ropes(config),
        rope_of_layer=tuple(int(kind == "sliding_attention") for kind in kinds),
        final_softcap=config.get("final_logit_softcapping", 0.0),
    )
    # hidden_act is a stale copy in published folders; hidden_activation is what counts.
    config.get("hidden_act", None)
    config.finish()
    return result


def _layer_types(config: HfConfig) -> list[str]:
    """Kind of each layer: given, or every n-th layer unlimited."""
    layers = config.size("num_hidden_layers")
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    kinds = config.get("layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)]
    check_layer_types(kinds, layers)
    return kinds


def _ropes(config: HfConfig) -> tuple[Rope, Rope]:
    """Rotary embeddings of unlimited layers and of windowed layers, in this order."""
    theta = config.get("rope_theta", 1e6)
    local = config.get("rope_local_base_freq", 1e4)
    entries = dict(config.get("rope_parameters", {}))
    stray = sorted(set(entries) - {"full_attention", "sliding_attention"})
    if stray:
        raise ConfigError(
            f"config key rope_parameters.{stray[0]}: gemma3_text has the entries full_attention and sliding_attention"
        )
    full = {**(entries.get("full_attention") or {}), **config.get("rope_scaling", {})}
    sliding = entries.get("sliding_attention") or {}
    return (
        parse_rope(full, theta, config, "rope_parameters.full_attention"),
        parse_rope(sliding, local, config, "rope_parameters.sliding_attention"),
    )


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder; ``families.to_hf`` checks that it says all."""
    return {
        **common_keys(config),
        "hidden_activation": activation_key(config),
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": round(config.query_scale**-2),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in config.windows],
        "sliding_window": max(config.windows) or None,
        "final_logit_softcapping": config.final_softcap or None,
        **write_rope(config.ropes[0]),
        "rope_local_base_freq": config.ropes[-1].theta,
    }


FAMILY = names.Family(
    model_type="gemma3_text",
    architectures={
        "lm": "Gemma3ForCausalLM",
        "value": "Gemma3TextForTokenClassification",
        "reward": "Gemma3TextForSequenceClassification",
    },
    from_hf=from_hf,
    to_hf=to_hf,
    not_stock=("value",),
    names=(
        *names.TRANSFORMER,
        *names.SANDWICH_NORMS,
        *names.QKV_BIAS,
        *names.OUT_BIAS,
        *names.QK_NORM,
        *names.HEADS,
    ),
)
