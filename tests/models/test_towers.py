"""Towers: other shapes, forms of attention, memory and devices give the same; what is frozen, and what is shared."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import media_models
from tests.models.media_models import CASES
from yatt_jax.models.audio import sinusoids
from yatt_jax.models.build import Model, build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.families import FAMILIES
from yatt_jax.models.layers import splice
from yatt_jax.models.media_packs import Room
from yatt_jax.models.names import flatten
from yatt_jax.parallel.partition import Partition, Split, make_partitions
from yatt_jax.types import Inputs, Media, Params


def config_of(name: str) -> DecoderConfig:
    case = CASES[name]
    return FAMILIES[case.config().model_type].from_hf(case.config().to_dict())


def inputs_of(config: DecoderConfig, name: str, **options: Any) -> Inputs:
    rng = np.random.default_rng(4)
    rows = [media_models.row(config, parts, rng) for parts in CASES[name].parts(config, rng)]
    return media_models.inputs_of(config, rows, **options)


def value(model: Model, params: Params, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    hidden, _ = model.bind(params)(inputs)
    hidden = jnp.where((inputs.segments > 0)[..., None], hidden, 0)
    return jnp.mean(jnp.sin(hidden * 1.3)), hidden


def run(model: Model, params: Params, inputs: Inputs, partition: Partition | None = None) -> Any:
    graded = jax.value_and_grad(lambda params, inputs: value(model, params, inputs), has_aux=True)
    if partition is None:
        return jax.jit(graded)(params, inputs)
    with partition.active():
        return jax.jit(graded)(params, jax.device_put(inputs, partition.replicated))


def assert_near(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


# Above 128 tokens attention runs block by block; more room, with which a pack is mostly padding.
ROOMS = {"qwen2_5_omni": Room(256, 9, 8), "gemma3": Room(160)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROOMS)
def test_other_ways_to_the_same(name, one_device):
    config = config_of(name)
    plain = build("lm", dataclasses.replace(config, attention="plain"))
    params = plain.init(0, one_device)
    expected = run(plain, params, inputs_of(config, name))
    roomy = inputs_of(config, name, size=ROOMS[name], packs=2)
    assert_near(run(build("lm", dataclasses.replace(config, remat="full")), params, roomy), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen2_5_vl"])
def test_on_eight_devices(name, one_device):
    config = config_of(name)
    model = build("lm", config)
    inputs = inputs_of(config, name, packs=2)
    expected = run(model, model.init(0, one_device), inputs)
    partition, _ = make_partitions(Split(2, 2, 2), Split(), jax.devices())
    assert_near(run(model, model.init(0, partition), inputs, partition), expected)


def test_features_made_elsewhere(one_device):
    config = config_of("qwen2_5_omni")
    model = build("reward", config)
    params = model.init(0, one_device)
    inputs = inputs_of(config, "qwen2_5_omni", packs=2)
    media = inputs.media
    assert media is not None
    assert media.patches is not None
    assert media.frames is not None
    features = jax.jit(lambda params, media: model.bind(params).decoder.features(media))(params, media)
    assert features.shape == (2, media.patches.pixels.shape[1] // 4 + media.frames.mels.shape[1] * 2, 32)
    given = dataclasses.replace(media, patches=None, frames=None, features=features)
    score = jax.jit(lambda params, inputs: model.bind(params)(inputs))
    scores = score(params, inputs)
    np.testing.assert_allclose(score(params, dataclasses.replace(inputs, media=given)), scores, atol=1e-5)
    blind = score(params, dataclasses.replace(inputs, media=None))
    assert np.abs(scores - blind)[1:].max() > 1e-3


def test_media_do_not_touch_other_rows(one_device):
    """Another image in one row, and another item in the pack, change nothing in the rows that do not show it."""
    config = config_of("qwen2_5_vl")
    model = build("lm", config)
    params = model.init(0, one_device)
    inputs = inputs_of(config, "qwen2_5_vl")
    media = inputs.media
    assert media is not None
    assert media.patches is not None
    shown = np.asarray(media.index[2])
    patches = np.repeat(np.isin(np.arange(len(media.patches.pixels[0]) // 4), shown[shown > 0] - 1), 4)
    assert 0 < patches.sum() < len(patches)
    pixels = np.where(patches[None, :, None], -np.asarray(media.patches.pixels), media.patches.pixels)
    other = dataclasses.replace(media, patches=dataclasses.replace(media.patches, pixels=pixels))
    forward = jax.jit(lambda params, inputs: value(model, params, inputs)[1])
    before, after = (forward(params, dataclasses.replace(inputs, media=m)) for m in (media, other))
    np.testing.assert_array_equal(before[:2], after[:2])
    assert np.abs(before[2] - after[2]).max() > 1e-3


def test_positions_of_whisper_are_not_trained(one_device):
    config = config_of("qwen2_audio")
    model = build("lm", config)
    (_, _), gradients = run(model, model.init(0, one_device), inputs_of(config, "qwen2_audio"))
    found = {path: float(np.abs(g).max()) for path, g in flatten(gradients)}
    assert found["decoder/audio/places"] == 0
    assert found["decoder/audio/first/kernel"] > 0
    # Sines of the lowest and the highest frequency, then cosines.
    table = sinusoids(3, 8)
    np.testing.assert_allclose(table[:, 0], np.sin([0.0, 1.0, 2.0]), atol=1e-6)
    np.testing.assert_allclose(table[:, 3], np.sin([0.0, 1e-4, 2e-4]), atol=1e-8)
    np.testing.assert_allclose(table[:, 4:].max(), 1.0)


def test_splice_by_hand():
    x = jnp.arange(8.0).reshape(2, 2, 2)
    features = jnp.asarray([[[10.0, 11.0], [20.0, 21.0]], [[30.0, 31.0], [40.0, 41.0]]])
    index = jnp.asarray([[0, 2], [1, 0]])
    of_two = splice(x, features, index).tolist()
    assert of_two == [[[0.0, 1.0], [20.0, 21.0]], [[30.0, 31.0], [6.0, 7.0]]]
    assert splice(x, features[:1], index).tolist()[1] == [[10.0, 11.0], [6.0, 7.0]]


def test_images_that_see_themselves_do_not_enter_a_cache(one_device):
    config = config_of("gemma3")
    model = build("lm", config)
    inputs = inputs_of(config, "gemma3")
    assert isinstance(inputs.media, Media)

    def fill(params: Params) -> Any:
        module = model.bind(params)
        _, cache = module(dataclasses.replace(inputs, media=None), collect=True)
        return module(inputs, cache)[0]

    with pytest.raises(ValueError, match="without a cache only"):
        jax.eval_shape(fill, model.abstract)
