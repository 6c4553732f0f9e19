"""Tiny random multimodal models made by transformers on torch, and rows that show images and sounds to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.media import media_of_rows
from yatt_jax.models.media_items import Item, Picture, Sound, cut, features, placeholder
from yatt_jax.models.media_packs import Room
from yatt_jax.models.tower_config import QwenVisionConfig, SiglipConfig
from yatt_jax.ops.masking import positions_from_segments
from yatt_jax.types import Inputs

torch.set_num_threads(1)
hf: Any = transformers  # whose classes take more keys than their types say

VOCAB = 96
IMAGE, VIDEO, AUDIO, LOOK, HEAR, END = range(90, 96)  # ids; texts have those below
_TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def gemma3(**options: Any) -> Any:
    text = hf.Gemma3TextConfig(
        **_TEXT,
        head_dim=16,
        sliding_window=5,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention"],
    )
    vision = hf.SiglipVisionConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=24,
        patch_size=4,
        vision_use_head=False,
    )
    return hf.Gemma3Config(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        mm_tokens_per_image=9,
        image_token_index=IMAGE,
        boi_token_index=LOOK,
        eoi_token_index=END,
        attn_implementation="eager",
        **options,
    )


_QWEN_VISION: dict[str, Any] = dict(
    depth=3,
    hidden_size=32,
    intermediate_size=40,
    num_heads=2,
    patch_size=2,
    window_size=8,
    out_hidden_size=32,
    fullatt_block_indexes=[1],
)
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_WHISPER: dict[str, Any] = dict(
    num_mel_bins=8,
    encoder_layers=2,
    encoder_attention_heads=2,
    encoder_ffn_dim=40,
    d_model=24,
    max_source_positions=16,
)


def qwen2_5_vl(**options: Any) -> Any:
    return hf.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE},
        vision_config={**_QWEN_VISION, "tokens_per_second": 4},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=LOOK,
        vision_end_token_id=END,
        attn_implementation="eager",
        **options,
    )


def qwen2_audio(**options: Any) -> Any:
    return hf.Qwen2AudioConfig(
        text_config={**_TEXT, "model_type": "qwen2"},
        audio_config={**_WHISPER, "model_type": "qwen2_audio_encoder"},
        audio_token_index=AUDIO,
        attn_implementation="eager",
        **options,
    )


def qwen2_5_omni(**options: Any) -> Any:
    return hf.Qwen2_5OmniThinkerConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE},
        vision_config=_QWEN_VISION,
        audio_config={**_WHISPER, "n_window": 4, "output_dim": 32},
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_token_index=AUDIO,
        vision_start_token_id=LOOK,
        vision_end_token_id=END,
        audio_start_token_id=HEAR,
        audio_end_token_id=END,
        attn_implementation="eager",
        **options,
    )


def scramble(model: torch.nn.Module, seed: int = 0) -> None:
    """Draws every parameter anew, so that no norm is 1 and no bias 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2 and "embed" not in name.rsplit(".", 2)[-2]:
            noise *= 1.2 * (parameter[0].numel()) ** -0.5
        elif parameter.ndim == 1 and ("norm" in name or "ln_" in name) and name.endswith("weight"):
            noise = 1 + 0.3 * noise
        else:
            noise *= 0.3
        parameter.data.copy_(noise)


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A saved random model."""

    folder: Path
    model: Any


def make(name: str, folder: Path, class_name: str = "", **options: Any) -> Tiny:
    """A model of ``CASES``, saved."""
    case = CASES[name]
    model = getattr(hf, class_name or case.architecture)(case.config(**options)).eval()
    scramble(model)
    model.save_pretrained(folder)
    return Tiny(folder, model)


def row(config: DecoderConfig, parts: Sequence[int | Item], rng: np.random.Generator) -> tuple[list[int], list[Item]]:
    """Tokens of a row of texts (so many tokens) and items, each between a begin and an end; and the items."""
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, int):
            tokens += rng.integers(3, 90, part).tolist()
        else:
            tokens += [
                HEAR if isinstance(part, Sound) else LOOK,
                *[placeholder(config, part)] * features(config, part),
                END,
            ]
    return tokens, [part for part in parts if not isinstance(part, int)]


def inputs_of(
    config: DecoderConfig,
    rows: Sequence[tuple[list[int], list[Item]]],
    *,
    packs: int = 1,
    size: Room | None = None,
) -> Inputs:
    """Rows padded on the right, as the model reads them."""
    length = max(len(tokens) for tokens, _ in rows)
    tokens, segments = np.zeros((2, len(rows), length), np.int32)
    for b, (ids, _) in enumerate(rows):
        tokens[b, : len(ids)], segments[b, : len(ids)] = ids, 1
    media = media_of_rows(config, tokens, segments, [items for _, items in rows], packs=packs, size=size)
    return Inputs(tokens, np.asarray(positions_from_segments(segments)), segments, media)  # type: ignore[arg-type]


def gemma3_items(config: DecoderConfig, rng: np.random.Generator) -> list[list[int | Item]]:
    """Parts of rows: no image, one, two with text between them, and one at the very start."""
    vision = config.vision
    assert isinstance(vision, SiglipConfig)
    side = vision.side * vision.patch
    a, b, c = (cut(rng.standard_normal((vision.channels, side, side), np.float32), vision) for _ in range(3))
    return [[7], [3, a, 4], [b, 2, c, 5], [2, a, 3]]


def gemma3_kwargs(items: list[Item], ids: torch.Tensor) -> dict[str, Any]:
    """What transformers is given beside the tokens of a row."""
    types = (ids == IMAGE).int()
    if not items:
        return {"token_type_ids": types}
    side = 6
    pixels = []
    for item in items:
        assert isinstance(item, Picture)
        squares = item.patches.reshape(3, 3, 2, 2, 3, 4, 4)  # square row and column, patch row and column, c, h, w
        pixels.append(squares.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, side * 4, side * 4))
    return {"token_type_ids": types, "pixel_values": torch.tensor(np.stack(pixels))}


def gemma3_features(model: Any, items: list[Item]) -> np.ndarray:
    """The features of some items, one after another."""
    with torch.no_grad():
        pixels = gemma3_kwargs(items, torch.zeros(1, 1))["pixel_values"]
        return model.get_image_features(pixels).pooler_output.reshape(-1, 32).numpy()


def picture(
    config: DecoderConfig, grid: tuple[int, int, int], rng: np.random.Generator, seconds: Any = None
) -> Picture:
    """Random patches for Qwen's tower."""
    assert isinstance(config.vision, QwenVisionConfig)
    size = int(np.prod(config.vision.patch_shape))
    return Picture(rng.standard_normal((int(np.prod(grid)), size), np.float32), grid, seconds)


def sound(config: DecoderConfig, length: int, rng: np.random.Generator) -> Sound:
    """Random frames, those that pad it included."""
    assert config.audio is not None
    return Sound(rng.standard_normal((2 * config.audio.positions, config.audio.bins), np.float32), length)


def qwen_vl_items(config: DecoderConfig, rng: np.random.Generator) -> list[list[int | Item]]:
    """Images of three sizes, a video of two temporal patches, and rows without any."""
    a, b, c = (picture(config, grid, rng) for grid in ((1, 4, 6), (1, 10, 4), (1, 2, 2)))
    video = picture(config, (2, 4, 4), rng, 1.0)
    return [[7], [3, a, 4, c], [video, 2, b, 5], [2, a, 3]]


def qwen_vl_kwargs(items: list[Item], ids: torch.Tensor) -> dict[str, Any]:
    """What transformers is given beside the tokens of a row."""
    given: dict[str, Any] = {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    for videos, pixels, grid in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        own = [i for i in items if isinstance(i, Picture) and (i.seconds is not None) == videos]
        if own:
            given |= {pixels: torch.tensor(np.concatenate([i.patches for i in own]))}
            given |= {grid: torch.tensor([i.grid for i in own])}
        if own and videos:
            given["second_per_grid_ts"] = torch.tensor([i.seconds for i in own])
    return given


def qwen_vl_features(model: Any, items: list[Item]) -> np.ndarray:
    """The features of some items, one after another."""
    with torch.no_grad():
        pixels = torch.tensor(np.concatenate([i.patches for i in items]))  # type: ignore[union-attr]
        out = model.get_image_features(pixels, torch.tensor([i.grid for i in items])).pooler_output  # type: ignore[union-attr]
        return torch.cat(out).numpy()


def qwen_audio_items(config: DecoderConfig, rng: np.random.Generator) -> list[list[int | Item]]:
    """Sounds of three lengths, one of them the longest there is, and rows without any."""
    a, b, c = (sound(config, length, rng) for length in (13, 32, 22))
    return [[7], [3, a, 4, b], [c, 2], [2, a, 3]]


def qwen_audio_kwargs(items: list[Item], ids: torch.Tensor) -> dict[str, Any]:
    """What transformers is given beside the tokens of a row."""
    sounds = [i for i in items if isinstance(i, Sound)]
    if not sounds:
        return {}
    mask = torch.tensor([[int(n < i.length) for n in range(len(i.mels))] for i in sounds])
    return {
        "input_features": torch.tensor(np.stack([i.mels.T for i in sounds])),
        "feature_attention_mask": mask,
    }


def qwen_audio_features(model: Any, items: list[Item]) -> np.ndarray:
    """The features of some items, one after another: what the projector gives within the model."""
    found: list[torch.Tensor] = []
    hook = model.model.multi_modal_projector.register_forward_hook(lambda module, given, out: found.append(out))
    counts = [(i.length + 1) // 2 // 2 for i in items if isinstance(i, Sound)]
    ids = torch.tensor([[AUDIO] * sum(counts)])
    with torch.no_grad():
        model(ids, attention_mask=torch.ones_like(ids), **qwen_audio_kwargs(items, ids))
    hook.remove()
    return np.concatenate([out[:count].numpy() for out, count in zip(found[0], counts, strict=True)])


def omni_items(config: DecoderConfig, rng: np.random.Generator) -> list[list[int | Item]]:
    """Images, a video and sounds in one sequence, and rows with some of them, or none."""
    a, b = (picture(config, grid, rng) for grid in ((1, 4, 6), (1, 8, 2)))
    video = picture(config, (2, 4, 4), rng, 0.25)
    x, y = (sound(config, length, rng) for length in (13, 19))
    return [[7], [3, a, 4, x, 2, video, y, 1], [y, 2, b, 5], [2, x, 3]]


def omni_kwargs(items: list[Item], ids: torch.Tensor) -> dict[str, Any]:
    """What transformers is given beside the tokens of a row."""
    given = qwen_vl_kwargs(items, ids)
    del given["mm_token_type_ids"]
    if "second_per_grid_ts" in given:
        given["video_second_per_grid"] = given.pop("second_per_grid_ts")
    return given | qwen_audio_kwargs(items, ids)


def omni_features(model: Any, items: list[Item]) -> np.ndarray:
    """The features of some items, one after another."""
    parts = []
    for item in items:
        if isinstance(item, Picture):
            parts.append(qwen_vl_features(model, [item]))
            continue
        with torch.no_grad():
            given = qwen_audio_kwargs([item], torch.zeros(1, 1))
            parts.append(model.get_audio_features(**given).last_hidden_state.numpy())
    return np.concatenate(parts)


@dataclasses.dataclass(frozen=True)
class Case:
    """A family.

    Attributes:
      architecture: the class of its language model.
      config: makes its configuration.
      parts: of rows, see ``row``.
      given: what transformers is given beside the tokens of a row.
      features: what transformers makes of items, one after another.
    """

    architecture: str
    config: Callable[..., Any]
    parts: Callable[[DecoderConfig, np.random.Generator], list[list[int | Item]]]
    given: Callable[[list[Item], torch.Tensor], dict[str, Any]]
    features: Callable[[Any, list[Item]], np.ndarray]


CASES = {
    "gemma3": Case("Gemma3ForConditionalGeneration", gemma3, gemma3_items, gemma3_kwargs, gemma3_features),
    "qwen2_5_vl": Case(
        "Qwen2_5_VLForConditionalGeneration", qwen2_5_vl, qwen_vl_items, qwen_vl_kwargs, qwen_vl_features
    ),
    "qwen2_audio": Case(
        "Qwen2AudioForConditionalGeneration", qwen2_audio, qwen_audio_items, qwen_audio_kwargs, qwen_audio_features
    ),
    "qwen2_5_omni": Case(
        "Qwen2_5OmniThinkerForConditionalGeneration", qwen2_5_omni, omni_items, omni_kwargs, omni_features
    ),
}
