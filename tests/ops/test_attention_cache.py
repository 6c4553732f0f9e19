"""Attention over a cache: the twin against packed rows, and the TPU kernel against the twin."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.attention import Cached, Packed, plain
from yatt_jax.ops.attention_cache import cached, side_of_blocks, tokens_of_blocks

LAYERS, LAYER = 2, 1


def cache_of(
    rows: int, kv_heads: int, places: int, head_dim: int, dtype: str = "float32", *, places_last: bool = False
) -> tuple[jax.Array, jax.Array]:
    keys, values = np.random.default_rng(places).standard_normal((2, LAYERS, rows, kv_heads, places, head_dim))
    return jnp.asarray(keys.swapaxes(3, 4) if places_last else keys, dtype), jnp.asarray(values, dtype)


def queries(rows: int, tokens: int, heads: int, head_dim: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(tokens).standard_normal((rows, tokens, heads, head_dim)), dtype)


def seen_from(starts: list[int], places_last: bool = False) -> Cached:
    return Cached(jnp.asarray(starts, jnp.int32), jnp.int32(LAYER), places_last)


@pytest.mark.parametrize("places_last", [False, True])
def test_a_piece_in_a_cache_equals_the_row_at_once(places_last: bool) -> None:
    keys, values = cache_of(1, 2, 12, 8, places_last=places_last)
    q = queries(1, 12, 4, 8)
    options = {"window": 5, "scale": 0.3, "softcap": 2.0}
    rows = cache_of(1, 2, 12, 8)[0][LAYER], values[LAYER]
    expected = plain(q, *rows, Packed(jnp.ones((1, 12), jnp.int32)), **options)
    for start, stop in ((0, 4), (4, 5), (5, 12)):
        found = plain(q[:, start:stop], keys, values, seen_from([start], places_last), **options)
        np.testing.assert_allclose(found, expected[:, start:stop], atol=1e-6)


# rows by their starts; a start at the end, past it, or a piece that reaches past it see nothing there
CASES = [
    # starts, queries, heads, key-value heads, size of a head, places, window, soft cap
    ([0, 1, 126, 127, 128, 299, 300, 1000], 1, 6, 2, 8, 300, 0, 0.0),
    ([0, 5, 130, 299, 300], 1, 4, 4, 16, 300, 100, 3.0),
    ([0, 3, 20, 23, 24], 3, 4, 2, 8, 24, 0, 0.0),
    ([0, 110, 290, 300], 20, 4, 1, 8, 300, 30, 2.0),
    ([0, 127, 200], 80, 2, 2, 8, 256, 0, 0.0),
]


def places_of_128(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in a short cache, the last of them cut off where the places are no multiple."""
    monkeypatch.setattr("yatt_jax.ops.attention_cache._KEY_BYTES", 1)


@pytest.mark.parametrize("places_last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_kernel_against_the_twin(case: tuple[Any, ...], places_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    places_of_128(monkeypatch)
    starts, tokens, heads, kv_heads, head_dim, places, window, softcap = case
    q = queries(len(starts), tokens, heads, head_dim)
    keys, values = cache_of(len(starts), kv_heads, places, head_dim, places_last=places_last)
    seen = seen_from(starts, places_last)
    options = {"window": jnp.int32(window), "scale": 0.3, "softcap": softcap}
    expected = jax.jit(partial(plain, **options))(q, keys, values, seen)
    found = jax.jit(partial(cached, **options, interpret=True))(q, keys, values, seen)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    nothing = np.asarray(starts)[:, None] + np.arange(tokens) >= places
    assert nothing.any() or places == 256
    np.testing.assert_array_equal(np.asarray(found)[nothing], 0)
    np.testing.assert_array_equal(np.asarray(expected)[nothing], 0)


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float32"])
def test_half_precision(cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places_of_128(monkeypatch)
    q, (keys, values) = queries(3, 1, 4, 16, "bfloat16"), cache_of(3, 2, 260, 16, cache_dtype)
    seen, options = seen_from([0, 140, 259]), {"window": 0, "scale": 0.25, "softcap": 0.0}
    wide = partial(jnp.asarray, dtype=jnp.float32)
    expected = plain(wide(q), wide(keys), wide(values), seen, **options)
    for found in (cached(q, keys, values, seen, **options, interpret=True), plain(q, keys, values, seen, **options)):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=0.02)


def test_blocks_of_places_beyond_a_row_and_its_window_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    places_of_128(monkeypatch)
    q, (keys, values) = queries(2, 1, 2, 8), cache_of(2, 1, 512, 8)
    seen, options = seen_from([10, 300]), {"window": jnp.int32(20), "scale": 0.3, "softcap": 0.0, "interpret": True}
    expected = cached(q, keys, values, seen, **options)
    unread = jnp.zeros((2, 512), bool).at[0, 128:].set(True).at[1, :256].set(True).at[1, 384:].set(True)
    keys, values = (jnp.where(unread[None, :, None, :, None], jnp.nan, x) for x in (keys, values))
    np.testing.assert_array_equal(cached(q, keys, values, seen, **options), expected)


@pytest.mark.parametrize(
    ("places", "width", "rows", "side"),
    [
        (104, 3 * 64 * 2, 3, 104),  # all of a short cache
        (4096, 8 * 128 * 2, 4, 512),
        (8192, 128 * 2, 512, 512),  # so that the logits of 512 rows fit
        (4109, 8 * 128 * 2, 4, 512),  # nothing divides it: the last block is cut off
        (640, 8 * 128 * 2, 4, 128),
        (10**6, 10**7, 10**6, 128),
    ],
)
def test_sides_of_blocks(places: int, width: int, rows: int, side: int) -> None:
    assert side_of_blocks(places, width, rows) == side


@pytest.mark.parametrize(
    ("tokens", "width", "block"),
    [(1, 8192, 1), (2, 8192, 16), (17, 8192, 32), (512, 8192, 64), (512, 16384, 32), (512, 65536, 16), (100, 768, 64)],
)
def test_tokens_of_blocks(tokens: int, width: int, block: int) -> None:
    assert tokens_of_blocks(tokens, width) == block
