"""What each model family says about media: its placeholder tokens, and the settings in its folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from yatt_jax.data.config import DataError
from yatt_jax.data.media.config import MediaConfig
from yatt_jax.data.media.mel import Mel
from yatt_jax.data.media.processor import MediaProcessor
from yatt_jax.data.media.vision import QwenPatches, SquarePatches
from yatt_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Names of the tokens of a family, where the tokenizer has no attribute of its own for them."""

    image: str = ""
    audio: str = ""
    video: str = ""


_TOKENS: Mapping[str, Tokens] = {
    "qwen2_5_vl": Tokens(image="<|image_pad|>", video="<|video_pad|>"),
    "qwen2_audio": Tokens(audio="<|AUDIO|>"),
    "qwen2_5_omni": Tokens(image="<|IMAGE|>", audio="<|AUDIO|>", video="<|VIDEO|>"),
    "gemma3": Tokens(image="<image_soft_token>"),
}
FAMILIES = tuple(_TOKENS)


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
    names = _TOKENS[family]
    places: dict[str, int] = {}
    for kind, name in (("image", names.image), ("audio", names.audio), ("video", names.video)):
        if name:
            places[kind] = _token(tokenizer, getattr(tokenizer, f"{kind}_token", None) or name, family)
    if family == "gemma3":
        begin, end = (getattr(tokenizer, f"{which}_token", None) for which in ("boi", "eoi"))
        begin, end = begin or "<start_of_image>", end or "<end_of_image>"
        for name in (begin, end):
            _token(tokenizer, name, family)
        soft = tokenizer.convert_ids_to_tokens(places["image"])
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
    """Id of a placeholder token.

    Raises:
      InputError: the tokenizer does not have it.
    """
    vocabulary = tokenizer.get_added_vocab()
    if name not in vocabulary:
        raise InputError(
            f"the tokenizer has no special token {name!r}, which {family} puts media in the place of; add it to the "
            f"tokenizer"
        )
    return vocabulary[name]


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
    names = _TOKENS[family]
    if not (image if names.image else audio):
        raise InputError(
            f"{folder}: a {family} model without preprocessor_config.json, which says how its media are prepared"
        )
    vision = config.get("vision_config") or {}
    return build_processor(
        family,
        tokenizer,
        limits,
        image=image,
        video=video,
        audio=audio,
        image_tokens=int(config.get("mm_tokens_per_image", 256)),
        patch=int(vision.get("patch_size", 14)),
    )


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
