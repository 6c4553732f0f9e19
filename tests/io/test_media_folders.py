"""Multimodal folders: import and export are inverse, and stock transformers computes and writes what we do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.models import media_models
from tests.models.media_models import CASES, Tiny
from yatt_jax.io.export import save_folder
from yatt_jax.io.hf import CheckpointError, load_model, read_folder
from yatt_jax.models.build import Kind, Model, build
from yatt_jax.models.decoder import Cache
from yatt_jax.models.families import FAMILIES, to_hf
from yatt_jax.models.media_items import Item
from yatt_jax.parallel.partition import Split, make_partitions
from yatt_jax.types import Inputs, Params

NEW = 7
Get = Callable[..., Tiny]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Makes (once) the named model, saved as a folder."""
    made: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in made:
            made[name] = media_models.make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def assert_same(a: Params, b: Params) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def greedy(model: Model, params: Params, rows: list[tuple[list[int], list[Item]]]) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the prompts, and their greedy continuations: prompts with media are laid into a cache, and go on there.

    What follows a prompt has the position past its largest.
    """
    inputs = media_models.inputs_of(model.config, rows)
    lengths = np.asarray([len(tokens) for tokens, _ in rows])
    assert inputs.media is not None
    rotary = inputs.media.positions
    following = jnp.asarray(lengths if rotary is None else np.asarray(rotary).max((1, 2)) + 1)

    @jax.jit
    def run(params: Params, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        module = model.bind(params)
        hidden, cache = module(inputs, collect=True)
        logits = module.logits(hidden)
        room = ((0, 0), (0, 0), (0, 0), (0, NEW), (0, 0))
        cache = Cache(jnp.pad(cache.keys, room), jnp.pad(cache.values, room))
        last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0].argmax(-1)

        def step(carry: tuple[jax.Array, Cache], i: jax.Array) -> tuple[tuple[jax.Array, Cache], jax.Array]:
            token, cache = carry
            one = Inputs(token[:, None], (following + i)[:, None], jnp.ones((len(rows), 1), jnp.int32))
            hidden, cache = module(one, cache, lengths + i)
            return (module.logits(hidden)[:, 0].argmax(-1), cache), token

        _, tokens = jax.lax.scan(step, (last, cache), jnp.arange(NEW))
        return logits, tokens.T

    logits, tokens = run(params, inputs)
    return np.asarray(logits), np.asarray(tokens)


def stock(folder: Path, class_name: str) -> Any:
    chosen = getattr(transformers, class_name)
    model, info = chosen.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_stock_logits_and_greedy_output(name, tiny, tmp_path, one_device):
    made, case = tiny(name), CASES[name]
    model, params = load_model(made.folder, "lm", one_device)
    params = jax.tree.map(lambda x: x * 0.875 + 0.01, params)
    values = read_folder(made.folder).hf_config
    theirs = stock(save_folder(tmp_path / "out", model, params, values, None, dtype="float32"), case.architecture)
    theirs.generation_config.eos_token_id = None
    rng = np.random.default_rng(5)
    rows = [media_models.row(model.config, parts, rng) for parts in case.parts(model.config, rng)]
    logits, tokens = greedy(model, params, rows)
    for b, (prompt, items) in enumerate(rows):
        ids = torch.tensor([prompt])
        given = case.given(items, ids) | {"attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            expected = theirs(ids, **given).logits[0].numpy()
            np.testing.assert_allclose(logits[b, : len(prompt)], expected, atol=1e-4)
            continued = theirs.generate(ids, max_new_tokens=NEW, do_sample=False, **given)
        assert continued[0, len(prompt) :].tolist() == tokens[b].tolist()
    assert len(np.unique(tokens)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_theirs_to_ours_and_back(name, tiny, tmp_path):
    """Read into shards of eight devices, and written in several files."""
    made = tiny(name)
    train, _ = make_partitions(Split(1, 4, 2), Split(-1, 1, 2))
    model, params = load_model(made.folder, "lm", train)
    out = tmp_path / "out"
    save_folder(out, model, params, read_folder(made.folder).hf_config, None, dtype="float32", shard_bytes=40_000)
    ours: dict[str, np.ndarray] = {}
    for file in out.glob("model-*.safetensors"):
        ours |= load_file(file)
    theirs = load_file(made.folder / "model.safetensors")
    if name == "gemma3":  # published folders have a part in their names that transformers 5 leaves out
        ours = {key.replace("vision_tower.vision_model.", "vision_tower."): tensor for key, tensor in ours.items()}
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        np.testing.assert_array_equal(ours[key], tensor)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["value", "reward"])
def test_scalar_models_and_back(kind: Kind, name, tiny, tmp_path, one_device):
    """From a language model; tensors in bfloat16."""
    made = tiny(name)
    model, params = load_model(made.folder, kind, one_device, dtype="bfloat16", seed=3)
    params = jax.tree.map(lambda x: (x * 0.875 + 0.01).astype(x.dtype), params)
    chosen = FAMILIES[read_folder(made.folder).model_type]
    known = kind not in chosen.not_stock
    with contextlib.nullcontext() if known else pytest.warns(match=f"no class for a {chosen.model_type}"):
        save_folder(tmp_path / "out", model, params, read_folder(made.folder).hf_config, None)
    again, read = load_model(tmp_path / "out", kind, one_device, dtype="bfloat16")
    assert again.config == model.config
    assert_same(read, params)
    if known:
        stock(tmp_path / "out", chosen.architectures[kind])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_made_here(name, tmp_path, one_device):
    """Its config.json says all of it, and transformers makes the same of that."""
    case = CASES[name]
    config = FAMILIES[case.config().model_type].from_hf(case.config().to_dict())
    model = build("lm", config)
    values = to_hf(case.config().model_type, config, max_positions=256)
    params = model.init(0, one_device)
    theirs = stock(save_folder(tmp_path / "out", model, params, values, None, dtype="float32"), case.architecture)
    assert theirs.config.get_text_config().max_position_embeddings == 256
    rng = np.random.default_rng(6)
    rows = [media_models.row(config, parts, rng) for parts in case.parts(config, rng)[1:2]]
    # The words around media are no part of a decoder, and transformers' positions follow them.
    for key in ("vision_start_token_id", "vision_end_token_id", "audio_start_token_id", "audio_end_token_id"):
        setattr(theirs.config, key, getattr(case.config(), key, None))
    ids = torch.tensor([rows[0][0]])
    with torch.no_grad():
        given = case.given(rows[0][1], ids)
        expected = theirs(ids, attention_mask=torch.ones_like(ids), **given).logits[0].numpy()
    inputs = media_models.inputs_of(config, rows)
    logits = jax.jit(lambda params, inputs: model.bind(params).logits(model.bind(params)(inputs)[0]))(params, inputs)
    np.testing.assert_allclose(logits[0], expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_names_of_every_version(name, tiny, tmp_path, one_device):
    """Tensors under the names that they have within the classes of transformers 5."""
    made = tiny(name)
    tensors = {key: tensor.detach().numpy() for key, tensor in made.model.named_parameters()}
    folder = tmp_path / "new"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((made.folder / "config.json").read_text())
    assert tensors.keys() != load_file(made.folder / "model.safetensors").keys()
    assert_same(load_model(folder, "lm", one_device)[1], load_model(made.folder, "lm", one_device)[1])


def test_the_thinker_of_a_whole_omni(tiny, tmp_path, one_device):
    made = tiny("qwen2_5_omni")
    folder = tmp_path / "whole"
    folder.mkdir()
    tensors = load_file(made.folder / "model.safetensors")
    talker = {"talker.model.norm.weight": np.ones(3, np.float32), "token2wav.x": np.ones(3, np.float32)}
    renamed = {f"thinker.{key}": tensor for key, tensor in tensors.items()}
    save_file(renamed | talker, folder / "model.safetensors")
    values = json.loads((made.folder / "config.json").read_text())
    whole = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": values}
    (folder / "config.json").write_text(json.dumps(whole | {"talker_config": {}}))
    model, params = load_model(folder, "lm", one_device)
    assert_same(params, load_model(made.folder, "lm", one_device)[1])
    out = save_folder(tmp_path / "out", model, params, read_folder(folder).hf_config, None, dtype="float32")
    assert load_file(out / "model.safetensors").keys() == tensors.keys()
    stock(out, "Qwen2_5OmniThinkerForConditionalGeneration")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni"}))
    with pytest.raises(CheckpointError, match="thinker_config is missing"):
        read_folder(folder)


def test_a_flat_config_of_qwen2_5_vl(tiny, tmp_path):
    """As it was published: the keys of the text beside those of the tower, under older names."""
    values = json.loads((tiny("qwen2_5_vl").folder / "config.json").read_text())
    text, vision = values.pop("text_config"), values.pop("vision_config")
    rope = text.pop("rope_parameters")
    del text["model_type"], vision["rope_parameters"]
    flat = values | text | {"rope_theta": rope["rope_theta"], "max_position_embeddings": 256}
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}, "model_type": "qwen2_5_vl"}
    flat["vision_config"] = vision | {"in_chans": 3, "spatial_patch_size": vision["patch_size"]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert read_folder(tmp_path).config == read_folder(tiny("qwen2_5_vl").folder).config


BAD = {
    "head": ("gemma3", {"vision_config": {"vision_use_head": True}}, "vision_config.vision_use_head is true"),
    "squares": ("gemma3", {"mm_tokens_per_image": 16}, "mm_tokens_per_image = 16: an image of 24 pixels has 6 patches"),
    "tower": ("gemma3", {"vision_config": {"model_type": "clip"}}, "model_type = 'clip' is not supported"),
    "sections": ("qwen2_5_vl", {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 2]}}}, r"\[2, 1, 2\]"),
    "window": ("qwen2_5_vl", {"vision_config": {"window_size": 3}}, "window_size = 3: a feature has 4 pixels"),
    "no text": ("qwen2_audio", {"text_config": None}, "text_config is missing"),
    "tied": ("qwen2_audio", {"tie_word_embeddings": True}, "never tie"),
    "chunk": ("qwen2_5_omni", {"audio_config": {"n_window": 5}}, "n_window = 5: 10 frames are no whole features"),
    "size": ("qwen2_5_omni", {"audio_config": {"d_model": 0}}, "config key audio_config.d_model = 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name, tiny, tmp_path):
    case, changes, message = BAD[name]
    values = json.loads((tiny(case).folder / "config.json").read_text())
    for key, change in changes.items():
        values[key] = {**values[key], **change} if isinstance(change, dict) else change
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        read_folder(tmp_path)


def test_what_a_family_cannot_say():
    config = FAMILIES["gemma3"].from_hf(CASES["gemma3"].config().to_dict())
    assert config.vision is not None
    for other in (dataclasses.replace(config, vision=None), dataclasses.replace(config, image_spans=False)):
        with pytest.raises(ValueError, match="gemma3"):
            to_hf("gemma3", other)
