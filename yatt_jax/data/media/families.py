"""What each model family says about media: its placeholder tokens, and the settings in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from yatt_jax.data.config import DataError
from yatt_jax.data.media.config import MediaConfig
from yatt_jax.data.media.mel import Mel
from yatt_jax.data.media.processor import MediaProcessor
from yatt_jax.data.media.sources import KINDS
from yatt_jax.data.media.vision import QwenPatches, SquarePatches
from yatt_jax.errors import InputError

# The special tokens of each family under the names that tokenizers and chat templates know them by. A tokenizer that
# has such a name may say another token.
_TOKENS: Mapping[str, Mapping[str, str]] = {
    "qwen2_5_vl": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    },
    "qwen2_audio": {
        "audio_token": "<|AUDIO|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    },
    "qwen2_5_omni": {
        "image_token": "<|IMAGE|>",
        "audio_token": "<|AUDIO|>",
        "video_token": "<|VIDEO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    },
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
}
FAMILIES = tuple(_TOKENS)


def with_tokens(tokenizer: PreTrainedTokenizerFast, family: str) -> PreTrainedTokenizerFast:
    """A new tokenizer for a model from scratch: the given one, with the special tokens of a family after its own.

    Chat templates write them by name, as ``{{ image_token }}``.

    Args:
      tokenizer: not changed; of its settings the padding and end tokens and the template are taken over.
      family: one of ``FAMILIES``.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
        extra_special_tokens=dict(_TOKENS[family]),
    )


def build_processor(
    family: str,
    tokenizer: PreTrainedTokenizerFast,
    limits: MediaConfig,
    *,
    image: Mapping[str, Any] | None = None,
    video: Mapping[str, Any] | None = None,
    audio: Mapping[str, Any] | None = None,
    image_tokens: int = 256,
    patch: int = 14,
) -> MediaProcessor:
    """The processor of a family.

    Args:
      family: one of ``FAMILIES``.
      tokenizer: the model's; it has the family's placeholder tokens.
      limits: what may be read.
      image: settings of the image processor, as in its preprocessor_config.json.
      video: settings of the video processor.
      audio: settings of the feature extractor.
      image_tokens: features of every image, for gemma3.
      patch: pixels of a patch's side, for gemma3.

    Raises:
      InputError: another family, a tokenizer without a placeholder token, or settings that are not read.
    """
    if family not in _TOKENS:
        raise InputError(f"model family {family!r} reads no media; those that do: {', '.join(FAMILIES)}")
    tokens = {name: _token(tokenizer, name, family) for name in _TOKENS[family]}
    places = {kind: tokens[f"{kind}_token"] for kind in KINDS if f"{kind}_token" in tokens}
    if family == "gemma3":
        soft, begin, end = (str(tokenizer.convert_ids_to_tokens(tokens[name])) for name in _TOKENS[family])
        return MediaProcessor(
            places,
            limits,
            vision=SquarePatches(image or {}, patch, image_tokens),
            begin=begin,
            whole=f"\n\n{begin}{soft}{end}\n\n",
        )
    vision = None if family == "qwen2_audio" else QwenPatches(image or {}, video)
    mel = None if family == "qwen2_5_vl" else Mel.from_settings({"feature_size": 128} | dict(audio or {}))
    return MediaProcessor(places, limits, vision=vision, mel=mel)


def _token(tokenizer: PreTrainedTokenizerFast, name: str, family: str) -> int:
    """Id of a special token.

    Raises:
      InputError: the tokenizer does not have it.
    """
    token = str(getattr(tokenizer, name, None) or _TOKENS[family][name])
    vocabulary = tokenizer.get_added_vocab()
    if token not in vocabulary:
        raise InputError(
            f"the tokenizer has no special token {token!r} ({name}), and {family} needs it for media; add it to the "
            f"tokenizer"
        )
    return vocabulary[token]


def load_processor(
    folder: str | Path, tokenizer: PreTrainedTokenizerFast, limits: MediaConfig
) -> MediaProcessor | None:
    """The processor of a model in a Hugging Face folder; None where its family reads no media.

    Read are ``processor_config.json``, ``preprocessor_config.json`` and ``video_preprocessor_config.json``, where they
    are there.

    Args:
      folder: with config.json.
      tokenizer: the model's.
      limits: what may be read.

    Raises:
      DataError: a damaged file.
      InputError: no settings for what the family reads, or settings that are not read.
    """
    folder = Path(folder)
    config = _read(folder / "config.json")
    family = str(config.get("model_type", ""))
    family = {"qwen2_5_omni_thinker": "qwen2_5_omni"}.get(family, family)
    if family not in _TOKENS:
        return None
    nested = _read(folder / "processor_config.json")
    flat = _read(folder / "preprocessor_config.json")
    image = nested.get("image_processor") or flat
    video = nested.get("video_processor") or _read(folder / "video_preprocessor_config.json") or flat
    audio = nested.get("feature_extractor") or flat
    if not (image if "image_token" in _TOKENS[family] else audio):
        raise InputError(
            f"{folder}: a {family} model without preprocessor_config.json, which says how its media are prepared"
        )
    vision = config.get("vision_config") or {}
    processor = build_processor(
        family,
        tokenizer,
        limits,
        image=image,
        video=video,
        audio=audio,
        image_tokens=int(config.get("mm_tokens_per_image", 256)),
        patch=int(vision.get("patch_size", 14)),
    )
    told = config.get("thinker_config") or config
    for kind, token in processor.places.items():
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            if told.get(name) not in (None, token):
                raise InputError(
                    f"{folder}: config.json says {name} = {told[name]}, and the tokenizer has the {kind} token at "
                    f"{token}; they belong to different models"
                )
    return processor


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; nothing where there is no file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: damaged: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{file}: expected an object")
    return found
