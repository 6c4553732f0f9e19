"""Attention over packed rows: the twin against NumPy in float64, and every faster form against the twin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.attention import Packed, plain, visible
from yatt_jax.ops.attention_blocks import blocks
from yatt_jax.ops.attention_cudnn import cudnn
from yatt_jax.ops.attention_splash import side_of_blocks, splash

# cuDNN's call with the arithmetic of the compiler in the place of the library, which only a GPU has.
FORMS: dict[str, Callable[..., jax.Array]] = {
    "blocks": partial(blocks, block=16),
    "splash": partial(splash, interpret=True),
    "cudnn": partial(cudnn, implementation="xla"),
}


def test_by_hand() -> None:
    # One head, two keys of one segment: logits 2 and 0; with the cap of 1 they become tanh(2) and 0.
    q, k, v = jnp.array([[[[0.0]], [[1.0]]]]), jnp.array([[[[2.0], [0.0]]]]), jnp.array([[[[1.0], [0.0]]]])
    one = partial(plain, q, k, v, Packed(jnp.ones((1, 2), jnp.int32)), scale=1.0)
    assert one(window=0, softcap=0.0)[0, 1].item() == pytest.approx(0.880797, abs=1e-6)
    assert one(window=0, softcap=1.0)[0, 1].item() == pytest.approx(0.723927, abs=1e-6)
    assert one(window=1, softcap=0.0)[0, 1].item() == 0.0  # its own value alone
    assert plain(q, k, v, Packed(jnp.zeros((1, 2), jnp.int32)), window=0, scale=1.0, softcap=0.0).tolist() == [
        [[[0.0]], [[0.0]]]
    ]


def test_what_is_visible() -> None:
    seen = visible(Packed(jnp.asarray([[1, 1, 1, 2, 2, 0]])), 6, 6, 2)[0].astype(int).tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]


def segments_of(lengths: list[list[int]], tokens: int) -> np.ndarray:
    rows = [[i + 1 for i, length in enumerate(row) for _ in range(length)] for row in lengths]
    return np.asarray([row + [0] * (tokens - len(row)) for row in rows], np.int32)


def problem(
    tokens: int, lengths: list[list[int]], heads: int, kv_heads: int, head_dim: int, dtype: str = "float32"
) -> tuple[Any, ...]:
    generator = np.random.default_rng(tokens)
    q = generator.standard_normal((len(lengths), tokens, heads, head_dim))
    k, v = generator.standard_normal((2, len(lengths), kv_heads, tokens, head_dim))
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(segments_of(lengths, tokens))


def reference(
    q: Any, k: Any, v: Any, segments: Any, spans: Any = None, *, window: int, scale: float, softcap: float, causal=True
) -> np.ndarray:
    """Query by query, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    spans = np.zeros(q.shape[:2]) if spans is None else spans
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(*q.shape[:3]):
        if segments[b, t] == 0:
            continue
        near = [s for s in range(q.shape[1]) if segments[b, s] == segments[b, t] and (t - s < window or window == 0)]
        seen = [s for s in near if s <= t or not causal or 0 < spans[b, s] == spans[b, t]]
        j = h // (q.shape[2] // k.shape[1])
        logits = k[b, j, seen] @ q[b, t, h] * scale
        logits = softcap * np.tanh(logits / softcap) if softcap else logits
        weights = np.exp(logits - logits.max())
        out[b, t, h] = weights @ v[b, j, seen] / weights.sum()
    return out


CASES = [
    # tokens, lengths, heads, key-value heads, size of a head, window, soft cap
    (37, [[20, 10], [37], [1, 1, 30]], 4, 2, 8, 0, 0.0),
    (37, [[20, 10], [37], []], 4, 2, 8, 5, 3.0),
    (129, [[64, 1, 60]], 6, 2, 16, 0, 2.0),
    (129, [[129]], 3, 3, 16, 40, 0.0),
    (48, [[16, 16, 16]], 2, 1, 8, 16, 0.0),
]


@pytest.mark.parametrize("case", CASES[:3])
def test_twin_against_numpy(case: tuple[Any, ...]) -> None:
    *shape, window, softcap = case
    arrays = problem(*shape)
    options = {"window": window, "scale": 0.3, "softcap": softcap}
    found = jax.jit(lambda q, k, v, segments: plain(q, k, v, Packed(segments), **options))(*arrays)
    np.testing.assert_allclose(found, reference(*arrays, **options), atol=2e-6)


def value(form: Callable[..., jax.Array], options: dict[str, Any], *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k, v, segments = arrays
    out = form(q, k, v, Packed(segments), **options)
    weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return jnp.sum(out.astype(jnp.float32) * weight), out


def out_and_gradients(form: Callable[..., jax.Array], options: dict[str, Any], arrays: tuple[Any, ...]) -> Any:
    run = jax.jit(jax.value_and_grad(partial(value, form, options), argnums=(0, 1, 2), has_aux=True))
    (_, out), gradients = run(*arrays)
    return out, gradients


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_form_against_the_twin(name: str, case: tuple[Any, ...]) -> None:
    *shape, window, softcap = case
    if name == "cudnn" and softcap:
        softcap = 0.0
    arrays = problem(*shape)
    options = {"window": window, "scale": 0.3, "softcap": softcap}
    expected = out_and_gradients(plain, options, arrays)
    found = out_and_gradients(
        FORMS[name], {k: options[k] for k in options if name != "cudnn" or k != "softcap"}, arrays
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    padding = np.asarray(arrays[3]) == 0
    for x in (found[0], found[1][0], *(g.swapaxes(1, 2) for g in found[1][1:])):
        np.testing.assert_array_equal(np.asarray(x)[padding], 0)


SPANS = np.zeros((3, 37), np.int32)
SPANS[0, 3:9], SPANS[0, 12:18], SPANS[0, 22:27] = 1, 2, 3
SPANS[1, 2:35] = 1
SPANS[2, 0:20] = 7  # also over two segments, which do not see each other


@pytest.mark.parametrize("name", ["plain", *FORMS])
@pytest.mark.parametrize(("kind", "window"), [("spans", 5), ("spans", 0), ("both ways", 0)])
def test_what_follows(name: str, kind: str, window: int) -> None:
    if (name, kind) == ("splash", "spans"):
        pytest.skip("the kernel knows none, see models.attention.choose")
    arrays = problem(37, [[20, 10], [37], [1, 1, 30]], 4, 2, 8)
    spans, causal = (SPANS, True) if kind == "spans" else (None, False)
    options = {"window": window, "scale": 0.3, "softcap": 0.0}
    form = FORMS.get(name, plain)

    def run(form: Callable[..., jax.Array], options: dict[str, Any], *arrays: Any) -> Any:
        seen = Packed(arrays[3], None if spans is None else jnp.asarray(spans), causal=causal)
        out = form(*arrays[:3], seen, **options)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

    def both(form: Callable[..., jax.Array], options: dict[str, Any]) -> Any:
        return jax.jit(jax.value_and_grad(partial(run, form, options), argnums=(0, 1, 2), has_aux=True))(*arrays)

    (_, out), gradients = both(form, {k: options[k] for k in options if name != "cudnn" or k != "softcap"})
    np.testing.assert_allclose(out, reference(*arrays, spans=spans, causal=causal, **options), atol=2e-6)
    for mine, theirs in zip(gradients, both(plain, options)[1], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_bfloat16_stays_near_float32(name: str) -> None:
    arrays = problem(64, [[40, 20]], 4, 2, 16, "bfloat16")
    wide = *(x.astype(jnp.float32) for x in arrays[:3]), arrays[3]
    options = {"window": 0, "scale": 0.25}
    softcap = {"softcap": 0.0}
    expected = out_and_gradients(plain, options | softcap, wide)
    found = out_and_gradients(FORMS[name], options if name == "cudnn" else options | softcap, arrays)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.02 * float(jnp.abs(b).max()))


def test_windows_of_blocks_may_be_traced() -> None:
    q, k, v, segments = problem(70, [[50, 20]], 2, 1, 8)
    traced = []

    @jax.jit
    def run(window: jax.Array) -> jax.Array:
        traced.append(window)
        return blocks(q, k, v, Packed(segments), window=window, scale=0.3, softcap=0.0, block=16)

    for window in (0, 1, 15, 16, 17, 33):
        expected = plain(q, k, v, Packed(segments), window=window, scale=0.3, softcap=0.0)
        np.testing.assert_allclose(run(jnp.int32(window)), expected, atol=1e-5)
    assert len(traced) == 1


def broken_before(token: int, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return k.at[:, :, :token].set(jnp.nan), v.at[:, :, :token].set(jnp.nan)


def test_blocks_that_nothing_sees_are_not_touched() -> None:
    # NaN in the keys and values of another document, a block away: computed and then masked, it would spread.
    q, k, v, segments = problem(64, [[32, 32]], 2, 1, 8)
    options = {"window": 0, "scale": 0.3, "softcap": 0.0, "block": 16}
    found = blocks(q, *broken_before(32, k, v), Packed(segments), **options)
    np.testing.assert_allclose(found[:, 32:], blocks(q, k, v, Packed(segments), **options)[:, 32:], atol=1e-6)
    window = options | {"window": 8}
    alone = Packed(jnp.ones_like(segments))
    found = blocks(q, *broken_before(16, k, v), alone, **window)
    np.testing.assert_allclose(found[:, 32:], blocks(q, k, v, alone, **window)[:, 32:], atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "side"),
    [(1, 128), (128, 128), (500, 512), (520, 128), (1000, 512), (1030, 128), (2048, 512), (8000, 512)],
)
def test_sides_of_splash(tokens: int, side: int) -> None:
    assert side_of_blocks(tokens) == side
    assert -tokens % side <= max(tokens / 8, 127)
