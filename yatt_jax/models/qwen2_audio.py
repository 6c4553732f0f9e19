"""Qwen2-Audio: Whisper's encoder over whole sounds, and a Qwen2 decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from yatt_jax.models import names, qwen2, tower_names
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.hf_config import ACTIVATION_KEYS, ConfigError, HfConfig
from yatt_jax.models.tower_config import AudioConfig, EncoderConfig

# What transformers assumes where a key is missing.
_TEXT_DEFAULTS = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32}
_TEXT_DEFAULTS |= {"num_attention_heads": 32}


def from_hf(values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder and tower that a config.json describes.

    Raises:
      ConfigError: a switch that is not supported, or a malformed value; the message names the key.
    """
    config = HfConfig(values)
    text = {**_TEXT_DEFAULTS, **config.part("text_config")}
    if text.get("model_type", "qwen2") != "qwen2" or text.pop("use_mrope", False):
        raise ConfigError("config key text_config: only a qwen2 decoder without M-RoPE can be built")
    audio = read_audio(config, token=config.size("audio_token_index", 151646))
    config.require_off("tie_word_embeddings", (False,), "the classes of this family never tie their output matrix")
    for key in ("ignore_index", "vocab_size"):
        config.get(key, None)
    config.finish()
    return dataclasses.replace(qwen2.from_hf({**text, "model_type": "qwen2"}), tied=False, audio=audio)


def read_audio(outer: HfConfig, *, token: int, chunks: bool = False) -> AudioConfig:
    """The tower of ``audio_config``.

    Args:
      outer: the whole config.
      token: placeholder of a feature.
      chunks: whether a chunk of the size that the config has is heard at a time.

    Raises:
      ConfigError: as ``from_hf``.
    """
    config = HfConfig(outer.part("audio_config", {}), "audio_config")
    config.require_off("scale_embedding", (False,), "embeddings are not scaled")
    encoder = EncoderConfig(
        hidden=config.size("d_model", 1280),
        layers=config.size("encoder_layers", 32),
        heads=config.size("encoder_attention_heads", 20),
        mlp=config.size("encoder_ffn_dim", 5120),
        norm_eps=1e-5,
        activation=config.activation("activation_function", "gelu"),
        key_bias=False,
    )
    half = config.size("n_window", 100) if chunks else 0
    if half % 2:
        raise ConfigError(f"config key audio_config.n_window = {half}: {2 * half} frames are no whole features")
    result = AudioConfig(
        encoder,
        token=token,
        bins=config.size("num_mel_bins", 128),
        positions=config.size("max_source_positions", 1500),
        chunk=2 * half,
    )
    # Dropout is off in this trainer; some keys are there for decoders that this model does not have.
    for key in ("dropout", "activation_dropout", "encoder_layerdrop", "output_dim", "num_hidden_layers"):
        config.get(key, None)
    config.finish()
    return result


def write_audio(config: DecoderConfig) -> dict[str, Any]:
    """The ``audio_config`` of a model; its type is the family's to add."""
    audio = config.audio
    if audio is None:
        raise ConfigError("this family needs an audio tower")
    encoder = audio.encoder
    chunks = {"n_window": audio.chunk // 2, "output_dim": config.hidden} if audio.chunk else {}
    return {
        "d_model": encoder.hidden,
        "encoder_layers": encoder.layers,
        "encoder_attention_heads": encoder.heads,
        "encoder_ffn_dim": encoder.mlp,
        "activation_function": ACTIVATION_KEYS[encoder.activation],
        "num_mel_bins": audio.bins,
        "max_source_positions": audio.positions,
        **chunks,
    }


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder and its tower; ``families.to_hf`` checks that it says all."""
    audio = write_audio(config)
    assert config.audio is not None
    return {
        "text_config": {"model_type": "qwen2", **qwen2.to_hf(config)},
        "audio_config": {"model_type": "qwen2_audio_encoder", **audio},
        "audio_token_index": config.audio.token,
    }


_TEXT = ("language_model.model.", "model.language_model.")
_HEAD = ("language_model.lm_head.", "lm_head.")
_PROJECTOR = ("multi_modal_projector.", "model.multi_modal_projector.")

FAMILY = names.Family(
    model_type="qwen2_audio",
    architectures={
        "lm": "Qwen2AudioForConditionalGeneration",
        "value": "Qwen2AudioForTokenClassification",
        "reward": "Qwen2AudioForSequenceClassification",
    },
    from_hf=from_hf,
    to_hf=to_hf,
    not_stock=("value", "reward"),
    names=(
        *names.under(names.under(qwen2.FAMILY.names, "model.", *_TEXT), "lm_head.", *_HEAD),
        *names.under(
            (
                *tower_names.whisper("decoder/audio"),
                names.Name("embed_positions.weight", "decoder/audio/places", "n d -> n d"),
                *tower_names.norm("layer_norm", "decoder/audio/norm"),
            ),
            "",
            "audio_tower.",
            "model.audio_tower.",
        ),
        *names.under(tower_names.linear("linear", "decoder/audio/project"), "", *_PROJECTOR),
    ),
)
