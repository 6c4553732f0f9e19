"""The thinker of Qwen2.5-Omni: text, images, videos and sounds in one sequence, text out.

A folder of the whole model holds its talker, too, which is not read; what is written is the thinker alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from yatt_jax.models import names, qwen2, tower_names
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.hf_config import HfConfig
from yatt_jax.models.qwen2_5_vl import read_text, read_vision, write_vision
from yatt_jax.models.qwen2_audio import read_audio, write_audio
from yatt_jax.models.tower_config import QwenVisionConfig

# What transformers assumes where a key is missing.
_TEXT_DEFAULTS = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
_TEXT_DEFAULTS |= {"num_attention_heads": 28, "num_key_value_heads": 4, "rope_theta": 1e6}


def from_hf(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder and towers that a thinker's config.json describes.

    Raises:
      ConfigError: a switch that is not supported, or a malformed value; the message names the key.
    """
    config = HfConfig(values)
    vision = read_vision(
        config,
        token=config.size("image_token_index", 151655),
        video_token=config.size("video_token_index", 151656),
        rate=float(config.size("position_id_per_seconds", 25)),
        omni=True,
    )
    audio = read_audio(config, token=config.size("audio_token_index", 151646), chunks=True)
    text = read_text({**_TEXT_DEFAULTS, **config.part("text_config")})
    tied = config.get("tie_word_embeddings", False)
    # What the processor reads, to write the text around items.
    for key in ("audio_start_token_id", "audio_end_token_id", "seconds_per_chunk", "user_token_id", "ignore_index"):
        config.get(key, None)
    for key in ("vision_start_token_id", "vision_end_token_id", "vision_token_id"):
        config.get(key, None)
    config.finish()
    return dataclasses.replace(text, tied=tied, vision=vision, audio=audio)


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder and its towers; ``families.to_hf`` checks that it says all."""
    vision, audio = write_vision(config), write_audio(config)
    assert isinstance(config.vision, QwenVisionConfig)
    assert config.audio is not None
    return {
        "text_config": {"model_type": "qwen2_5_omni_text", **qwen2.to_hf(config)},
        "vision_config": {"model_type": "qwen2_5_omni_vision_encoder", **vision},
        "audio_config": {"model_type": "qwen2_5_omni_audio_encoder", **audio},
        "image_token_index": config.vision.token,
        "video_token_index": config.vision.video_token,
        "audio_token_index": config.audio.token,
        "position_id_per_seconds": round(config.vision.rate),
        "tie_word_embeddings": config.tied,
    }


def thinker(values: Mapping[str, Any]) -> dict[str, Any]:
    """The thinker's part of a whole model's config.json.

    Raises:
      ConfigError: it has none.
    """
    part = HfConfig(values).part("thinker_config")
    return {**part, "model_type": "qwen2_5_omni_thinker"}


_TABLE = (
    *names.under((*names.TRANSFORMER, *names.MLP_NORM, *names.QKV_BIAS), "model.", "model.", "model.language_model."),
    *names.under(tower_names.qwen_vision("decoder/vision", "{part}"), "", "visual.", "model.visual."),
    *names.under(
        (
            *tower_names.whisper("decoder/audio"),
            names.Name("audio_bos_eos_token.weight", "decoder/audio/ends", "n d -> n d"),
            *tower_names.norm("ln_post", "decoder/audio/norm"),
            *tower_names.linear("proj", "decoder/audio/project"),
        ),
        "",
        "audio_tower.",
        "model.audio_tower.",
    ),
)

FAMILY = names.Family(
    model_type="qwen2_5_omni_thinker",
    architectures={
        "lm": "Qwen2_5OmniThinkerForConditionalGeneration",
        "value": "Qwen2_5OmniThinkerForTokenClassification",
        "reward": "Qwen2_5OmniThinkerForSequenceClassification",
    },
    from_hf=from_hf,
    to_hf=to_hf,
    not_stock=("value", "reward"),
    names=(
        *names.under(_TABLE, "", "", "thinker."),
        *names.under(names.HEADS, "lm_head.", "lm_head.", "thinker.lm_head."),
    ),
    unread=("talker.", "token2wav."),
)
