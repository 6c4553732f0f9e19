"""Gemma 3 with SigLIP: images of one size, whose tokens see each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from yatt_jax.models import gemma3, names, tower_names
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.hf_config import ACTIVATION_KEYS, ConfigError, HfConfig
from yatt_jax.models.tower_config import EncoderConfig, SiglipConfig

# What transformers assumes of text_config, which published folders leave out.
_TEXT_DEFAULTS = {"vocab_size": 262208, "num_attention_heads": 8, "hidden_size": 2304, "intermediate_size": 9216}
_TEXT_DEFAULTS |= {"num_hidden_layers": 26}


def from_hf(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder and tower that a config.json describes.

    Raises:
      ConfigError: a switch that is not supported, or a malformed value; the message names the key.
    """
    config = HfConfig(values)
    text = gemma3.from_hf({**_TEXT_DEFAULTS, **config.part("text_config", {}), "model_type": "gemma3_text"})
    vision = _vision(config)
    tied = config.get("tie_word_embeddings", True)
    for key in ("boi_token_index", "eoi_token_index", "vocab_size"):
        config.get(key, None)
    config.finish()
    return dataclasses.replace(text, tied=tied, vision=vision, image_spans=True)


def _vision(outer: HfConfig) -> SiglipConfig:
    config = HfConfig(outer.part("vision_config", {}), "vision_config")
    config.require_off("model_type", ("siglip_vision_model",), "only SigLIP can be built")
    if config.get("vision_use_head", True):
        raise ConfigError(
            "config key vision_config.vision_use_head is true (its default): gemma3 reads no pooling head; set it to "
            "false and leave out the tensors of vision_model.head"
        )
    pixels, patch = config.size("image_size", 224), config.size("patch_size", 16)
    tokens = outer.size("mm_tokens_per_image", 256)
    side, features = pixels // patch, math.isqrt(tokens)
    if features**2 != tokens or side % features or pixels % patch:
        raise ConfigError(
            f"config key mm_tokens_per_image = {tokens}: an image of {pixels} pixels has {side} patches of {patch} on "
            "a side, which squares of equal size must divide into so many features"
        )
    encoder = EncoderConfig(
        hidden=config.size("hidden_size", 768),
        layers=config.size("num_hidden_layers", 12),
        heads=config.size("num_attention_heads", 12),
        mlp=config.size("intermediate_size", 3072),
        norm_eps=float(config.get("layer_norm_eps", 1e-6)),
        activation=config.activation("hidden_act", "gelu_pytorch_tanh"),
    )
    result = SiglipConfig(
        encoder,
        token=outer.get("image_token_index", 262144),
        side=side,
        merge=side // features,
        patch=patch,
        channels=config.size("num_channels", 3),
    )
    config.finish()
    return result


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder and its tower; ``families.to_hf`` checks that it says all."""
    vision = config.vision
    if not isinstance(vision, SiglipConfig):
        raise ConfigError("a gemma3 config needs a SigLIP tower; gemma3_text is the family without one")
    encoder = vision.encoder
    return {
        "text_config": {"model_type": "gemma3_text", **gemma3.to_hf(config)},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": encoder.hidden,
            "num_hidden_layers": encoder.layers,
            "num_attention_heads": encoder.heads,
            "intermediate_size": encoder.mlp,
            "layer_norm_eps": encoder.norm_eps,
            "hidden_act": ACTIVATION_KEYS[encoder.activation],
            "image_size": vision.side * vision.patch,
            "patch_size": vision.patch,
            "num_channels": vision.channels,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": (vision.side // vision.merge) ** 2,
        "image_token_index": vision.token,
        "tie_word_embeddings": config.tied,
    }


_TEXT = ("language_model.model.", "model.language_model.")
_HEAD = ("language_model.lm_head.", "lm_head.")
_TOWER = ("vision_tower.vision_model.", "model.vision_tower.vision_model.", "model.vision_tower.", "vision_tower.")
_PROJECTOR = ("multi_modal_projector.", "model.multi_modal_projector.")

FAMILY = names.Family(
    model_type="gemma3",
    architectures={
        "lm": "Gemma3ForConditionalGeneration",
        "value": "Gemma3ForTokenClassification",
        "reward": "Gemma3ForSequenceClassification",
    },
    from_hf=from_hf,
    to_hf=to_hf,
    not_stock=("value",),
    names=(
        *names.under(names.under(gemma3.FAMILY.names, "model.", *_TEXT), "lm_head.", *_HEAD),
        *names.under(tower_names.siglip("decoder/vision"), "", *_TOWER),
        *names.under(
            (
                names.Name("mm_soft_emb_norm.weight", "decoder/vision/feature_norm/scale", "d -> d"),
                names.Name("mm_input_projection_weight", "decoder/vision/project/kernel", "d f -> d f"),
            ),
            "",
            *_PROJECTOR,
        ),
    ),
)
