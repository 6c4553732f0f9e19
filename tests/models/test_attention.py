"""The choice among the forms of attention, and each of them on several devices against the twin on one."""

from __future__ import annotations

import dataclasses
import types
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.models.attention import Form, attend, cache_places, choose, keys_places_last
from yatt_jax.models.build import build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.decoder import Cache, write
from yatt_jax.ops.attention import Cached, Packed, Seen
from yatt_jax.parallel.partition import Partition, Split, make_partitions
from yatt_jax.types import Inputs

CPU, TPU = (types.SimpleNamespace(platform=name) for name in ("cpu", "tpu"))
AMPERE, TURING = (types.SimpleNamespace(platform="gpu", compute_capability=c) for c in ("8.0", "7.5"))
AMD = types.SimpleNamespace(platform="gpu", compute_capability="gfx942")
PACKED, CACHED = Packed(jnp.ones((1, 1), jnp.int32)), Cached(jnp.zeros(1, jnp.int32), jnp.int32(0))
SPANS = dataclasses.replace(PACKED, spans=PACKED.segments)
OPTIONS: dict[str, Any] = {"scale": 0.5, "softcap": 0.0}
WINDOWS = (0, 3)


def test_both_ways_to_write_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    new = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 2, 4, 8)), jnp.float32)
    written = []
    for by_head in (False, True):
        monkeypatch.setattr("yatt_jax.models.decoder.writes_by_head", lambda by_head=by_head: by_head)
        cache = Cache.zeros(dataclasses.replace(CONFIG, head_dim=8), 3, 6)
        written.append(write(cache, jnp.int32(1), jnp.asarray([0, 4, 6]), *new))
    jax.tree.map(np.testing.assert_array_equal, *written)
    keys = np.asarray(written[1].keys)
    np.testing.assert_array_equal(keys[1, 0, :, :4], new[0, 0])
    np.testing.assert_array_equal(keys[1, 1, :, 4:], new[0, 1, :, :2])  # what reaches past the end is dropped
    assert not keys[0].any()
    assert not keys[1, 2].any()


@pytest.mark.parametrize(
    ("device", "seen", "changes", "expected"),
    [
        (CPU, PACKED, {}, "blocks"),
        (CPU, PACKED, {"tokens": 128}, "plain"),
        (CPU, CACHED, {}, "plain"),
        (None, PACKED, {}, "blocks"),
        (None, CACHED, {}, "plain"),
        (TPU, PACKED, {}, "splash"),
        (TPU, PACKED, {"softcap": 50.0, "head_dim": 256}, "splash"),
        (TPU, PACKED, {"tokens": 127}, "plain"),
        (TPU, SPANS, {}, "blocks"),
        (TPU, CACHED, {}, "cache"),
        (TPU, CACHED, {"tokens": 1}, "cache"),
        (AMPERE, PACKED, {}, "cudnn"),
        (AMPERE, SPANS, {}, "cudnn"),
        (AMPERE, PACKED, {"dtype": "float32"}, "blocks"),
        (AMPERE, PACKED, {"dtype": "float32", "tokens": 1024}, "plain"),
        (AMPERE, PACKED, {"softcap": 50.0}, "blocks"),
        (AMPERE, PACKED, {"head_dim": 256}, "blocks"),
        (AMPERE, PACKED, {"head_dim": 60}, "blocks"),
        (AMPERE, CACHED, {}, "plain"),
        (TURING, PACKED, {}, "blocks"),
        (AMD, PACKED, {}, "blocks"),
    ],
)
def test_choice(device: Any, seen: Seen, changes: dict[str, Any], expected: Form) -> None:
    shape = {"tokens": 2048, "head_dim": 64, "dtype": "bfloat16", "softcap": 0.0} | changes
    assert choose(device, seen, **shape) == expected


def test_layout_of_caches() -> None:
    assert [keys_places_last(device) for device in (CPU, TPU, AMPERE)] == [True, False, False]
    assert [cache_places(device, 104) for device in (CPU, TPU, AMPERE)] == [104, 128, 104]
    assert cache_places(TPU, 256) == 256


def packed_problem(rows: int, heads: int, kv_heads: int, tokens: int = 10) -> tuple[jax.Array, ...]:
    generator = np.random.default_rng(rows + heads)
    q = generator.standard_normal((rows, tokens, heads, 8), np.float32)
    k, v = generator.standard_normal((2, rows, kv_heads, tokens, 8), np.float32)
    segments = np.sort(generator.integers(1, 4, (rows, tokens)), axis=1).astype(np.int32)
    segments[:, -2:] = 0
    return jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(segments)


def packed_value(form: Form, which: Any, q: Any, k: Any, v: Any, segments: Any) -> tuple[jax.Array, jax.Array]:
    out = attend(
        q, k, v, Packed(segments), windows=WINDOWS, which=which, form=form, interpret=form == "splash", **OPTIONS
    )
    return jnp.mean(jnp.sin(out * 1.3)), out


def run_packed(partition: Partition | None, form: Form, which: Any, *arrays: jax.Array) -> Any:
    def run(*arrays: jax.Array) -> Any:
        return jax.value_and_grad(partial(packed_value, form, which), argnums=(0, 1, 2), has_aux=True)(*arrays)

    if partition is None:
        return jax.jit(run)(*arrays)
    with partition.active():
        return jax.jit(run)(*jax.device_put(arrays, partition.replicated))


# Query heads, key-value heads, what the mesh is told of them, rows. With 2 key-value heads and 4 devices on the tensor
# axis, each device holds its own head where the mesh knows of them, and cuts it out of both where it does not.
@pytest.mark.parametrize(
    ("split", "heads", "kv_heads", "known", "rows"),
    [
        (Split(2, 2, 2), 4, 2, (), 4),
        (Split(-1, 1, 4), 8, 2, (2,), 2),
        (Split(-1, 1, 4), 8, 2, (), 2),
        (Split(-1, 1, 4), 4, 4, (), 3),  # rows that do not divide
        (Split(-1, 1, 2), 6, 3, (), 4),  # a device's queries end in the middle of a head's
    ],
)
@pytest.mark.parametrize("form", ["plain", "blocks", "splash"])
def test_packed_rows_on_eight_devices(
    split: Split, heads: int, kv_heads: int, known: tuple[int, ...], rows: int, form: Form
) -> None:
    partition, _ = make_partitions(split, Split(), jax.devices(), kv_heads=known)
    arrays = packed_problem(rows, heads, kv_heads)
    for which in (jnp.int32(1), 0):
        expected = run_packed(None, "plain", which, *arrays)
        found = run_packed(partition, form, which, *arrays)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


@pytest.mark.parametrize("places_last", [False, True])
@pytest.mark.parametrize(
    ("split", "heads", "kv_heads", "known"),
    [(Split(4, 1, 2), 4, 2, ()), (Split(2, 1, 4), 8, 2, (2,)), (Split(2, 1, 4), 8, 2, ())],
)
def test_a_cache_on_eight_devices(
    split: Split, heads: int, kv_heads: int, known: tuple[int, ...], places_last: bool
) -> None:
    _, partition = make_partitions(Split(), split, jax.devices(), kv_heads=known)
    generator = np.random.default_rng(0)
    q = generator.standard_normal((4, 3, heads, 8), np.float32)
    keys, values = generator.standard_normal((2, 2, 4, kv_heads, 12, 8), np.float32)
    keys = keys.swapaxes(3, 4) if places_last else keys
    seen = Cached(jnp.asarray([0, 5, 11, 12], jnp.int32), jnp.int32(1), places_last)

    def run(form: Form, q: Any, keys: Any, values: Any, seen: Cached) -> jax.Array:
        return attend(q, keys, values, seen, windows=WINDOWS, which=1, form=form, interpret=form == "cache", **OPTIONS)

    expected = jax.jit(partial(run, "plain"))(q, keys, values, seen)
    with partition.active():
        for form in ("plain", "cache"):
            found = jax.jit(partial(run, form))(*jax.device_put((q, keys, values, seen), partition.replicated))
            np.testing.assert_allclose(found, expected, atol=1e-5)


# Window 5 in one layer and none in another; rows of 140 tokens are attended to in blocks.
CONFIG = DecoderConfig(
    vocab=32, hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=16, windows=(0, 5), attention_softcap=4.0
)


def test_decoders_follow_the_setting_and_agree(one_device: Partition) -> None:
    assert (CONFIG.distinct_windows, CONFIG.window_of_layer) == ((0, 5), (0, 1))
    models = {form: build("lm", dataclasses.replace(CONFIG, attention=form)) for form in ("auto", "plain")}
    params = models["auto"].init(0, one_device)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (1, 140)))
    segments = jnp.asarray([[1] * 70 + [2] * 61 + [0] * 9])
    inputs = Inputs(tokens, jnp.arange(140)[None] % 70, segments)

    def loss(model: Any, params: Any) -> jax.Array:
        return jnp.mean(model.bind(params)(inputs)[0][:, :131] ** 2 * jnp.arange(131)[:, None])

    texts = {form: jax.jit(partial(loss, model)).lower(params).as_text() for form, model in models.items()}
    assert "tensor<140x140xi1>" not in texts["auto"]
    assert "140x140" in texts["plain"]
    found, expected = (jax.jit(jax.value_and_grad(partial(loss, models[form])))(params) for form in ("auto", "plain"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-5), found, expected)


def test_both_layouts_of_a_cache_give_the_same(one_device: Partition) -> None:
    model = build("lm", CONFIG)
    params = model.init(0, one_device)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 6)))
    results = []
    for places_last in (False, True):
        cache = Cache.zeros(CONFIG, 2, 8, places_last=places_last)
        assert cache.keys.shape[3:] == ((4, 8) if places_last else (8, 4))
        for start, stop in ((0, 4), (4, 5), (5, 6)):
            piece = Inputs(tokens[:, start:stop], jnp.full((2, stop - start), start) + jnp.arange(stop - start), None)  # pyright: ignore[reportArgumentType]
            piece = dataclasses.replace(piece, segments=jnp.ones_like(piece.tokens))
            hidden, cache = model.bind(params)(piece, cache, jnp.full(2, start))
        results.append((hidden, cache.laid_out(False)))
        assert cache.places_last == places_last
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results)
