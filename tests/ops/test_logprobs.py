from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.logprobs import logprobs_from_hidden
from yatt_jax.ops.select import pack_kept
from yatt_jax.types import Logprobs

B, T, D, V = 3, 9, 5, 19
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(B, T, D)).astype(np.float32)
MATRIX = RNG.normal(size=(V, D)).astype(np.float32)
TOKENS = RNG.integers(0, V, (B, T))
KEPT = RNG.random((B, T, V)) < 0.4
MASK = np.zeros((B, T), np.float32)  # row 2 has no response
MASK[0, 3:7] = 1
MASK[1, [4, 6, 7, 8]] = 1
WEIGHTS = RNG.normal(size=(2, B, T)).astype(np.float32)


def definition(hidden, matrix, temperature, softcap, kept, mask) -> tuple[np.ndarray, np.ndarray]:
    """Float64, token by token."""
    logprobs, entropy = np.zeros((2, B, T))
    for b in range(B):
        for t in range(1, T):
            if not mask[b, t]:
                continue
            z = matrix.astype(np.float64) @ hidden[b, t - 1].astype(np.float64)
            z = softcap * np.tanh(z / softcap) if softcap else z
            z = z / temperature
            if kept is not None:
                z[~kept[b, t]] = -np.inf
            p = np.exp(z - z.max())
            p /= p.sum()
            logprobs[b, t] = np.log(p[TOKENS[b, t]])
            entropy[b, t] = -np.sum(p[p > 0] * np.log(p[p > 0]))
    return logprobs, entropy


@functools.cache
def compiled(softcap: float, filtered: bool, capacity: int | None, chunk: int, row_shards: int = 1):
    def scores(hidden, matrix, temperature, kept, mask):
        return logprobs_from_hidden(
            hidden,
            matrix,
            jnp.asarray(TOKENS),
            temperature=temperature,
            softcap=softcap,
            kept=kept if filtered else None,
            mask=mask,
            capacity=capacity,
            chunk=chunk,
            row_shards=row_shards,
        )

    def total(hidden, matrix, temperature, kept, mask):
        got = scores(hidden, matrix, temperature, kept, mask)
        return jnp.sum(WEIGHTS[0] * got.logprobs + WEIGHTS[1] * got.entropy), got

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))


def kept_with_tokens() -> np.ndarray:
    kept = KEPT.copy()
    np.put_along_axis(kept, TOKENS[..., None], True, axis=-1)
    return kept


@pytest.mark.parametrize(
    ("softcap", "filtered", "capacity", "chunk"),
    [(0.0, False, None, 7), (0.0, False, 4, 7), (2.0, False, 4, 100), (0.0, True, None, 100), (2.0, True, 4, 1)],
)
def test_against_the_definition(softcap, filtered, capacity, chunk):
    kept = kept_with_tokens()
    bits = pack_kept(jnp.asarray(kept))
    (_, got), (d_hidden, d_matrix) = compiled(softcap, filtered, capacity, chunk)(HIDDEN, MATRIX, 0.7, bits, MASK)
    truth = functools.partial(definition, temperature=0.7, softcap=softcap, kept=kept if filtered else None, mask=MASK)
    logprobs, entropy = truth(HIDDEN, MATRIX)
    np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-5)
    np.testing.assert_allclose(got.entropy, entropy, atol=1e-5)

    def value(hidden, matrix):
        return float(np.sum(WEIGHTS * np.stack(truth(hidden, matrix))))

    rng, h = np.random.default_rng(1), 1e-5
    for _ in range(3):  # central differences along random directions
        u, w = rng.normal(size=HIDDEN.shape), rng.normal(size=MATRIX.shape)
        slope = (value(HIDDEN + h * u, MATRIX + h * w) - value(HIDDEN - h * u, MATRIX - h * w)) / (2 * h)
        assert np.sum(d_hidden * u) + np.sum(d_matrix * w) == pytest.approx(slope, rel=1e-4, abs=1e-4)
    # Hidden states that predict nothing wanted have no gradient.
    wanted = np.zeros((B, T), bool)
    wanted[:, :-1] = MASK[:, 1:] > 0
    assert not np.any(np.asarray(d_hidden)[~wanted])


def test_the_zeroth_token_and_the_rest_of_a_row_get_zero():
    mask = np.ones((B, T), np.float32)
    (_, got), _ = compiled(0.0, False, None, 7)(HIDDEN, MATRIX, 1.0, pack_kept(jnp.asarray(KEPT)), mask)
    assert not np.any(got.logprobs[:, 0])
    assert np.all(np.asarray(got.logprobs[:, 1:]) < 0)
    score = jax.jit(lambda *arrays: logprobs_from_hidden(*arrays, temperature=1.0, chunk=7))
    unmasked = score(HIDDEN, MATRIX, TOKENS)
    np.testing.assert_allclose(unmasked.logprobs, got.logprobs, atol=1e-6)


def test_a_changed_temperature_compiles_nothing_and_counts():
    traces = []

    @jax.jit
    def entropy(temperature):
        traces.append(temperature)
        arrays = (jnp.asarray(HIDDEN), jnp.asarray(MATRIX), jnp.asarray(TOKENS))
        return logprobs_from_hidden(*arrays, temperature=temperature, chunk=100).entropy.sum()

    low, middle, high = (float(entropy(jnp.float32(temperature))) for temperature in (0.6, 1.0, 1.3))
    assert low < middle < high
    assert len(traces) == 1


def test_the_token_itself_counts_as_kept():
    nothing = np.zeros_like(KEPT)
    (_, got), grads = compiled(0.0, True, None, 100)(HIDDEN, MATRIX, 1.0, pack_kept(jnp.asarray(nothing)), MASK)
    np.testing.assert_array_equal(got.logprobs, np.zeros((B, T)))  # alone in its support
    assert all(np.all(np.isfinite(g)) and not np.any(g) for g in grads)


def test_a_token_beyond_the_capacity_is_never_silently_zero():
    (_, got), _ = compiled(0.0, False, 3, 7)(HIDDEN, MATRIX, 1.0, pack_kept(jnp.asarray(KEPT)), MASK)
    assert np.isnan(got.logprobs[0, 6])
    assert np.all(np.isfinite(got.logprobs[0, 3:6]))


def test_leading_axes():
    twice = lambda x: jnp.asarray(x)[:, None].repeat(2, 1)  # noqa: E731
    score = jax.jit(lambda h, w, t, m: logprobs_from_hidden(h, w, t, temperature=1.0, mask=m, capacity=4))
    got = score(twice(HIDDEN), MATRIX, twice(TOKENS), twice(MASK))
    assert got.logprobs.shape == (B, 2, T)
    expected, _ = definition(HIDDEN, MATRIX, 1.0, 0.0, None, MASK)
    np.testing.assert_allclose(got.logprobs[:, 1], expected, atol=1e-5)


def test_row_shards_change_the_order_of_sums_only():
    bits = pack_kept(jnp.asarray(KEPT))
    one = compiled(0.0, False, 4, 7)(HIDDEN, MATRIX, 0.7, bits, MASK)
    three = compiled(0.0, False, 4, 7, 3)(HIDDEN, MATRIX, 0.7, bits, MASK)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, three)


def test_bfloat16_hidden_states():
    hidden, matrix = jnp.asarray(HIDDEN, jnp.bfloat16), jnp.asarray(MATRIX)
    score = jax.jit(lambda h, w, t, m: logprobs_from_hidden(h, w, t, temperature=1.0, mask=m, capacity=4, chunk=7))
    got = score(hidden, matrix, TOKENS, MASK)
    rounded = np.asarray(matrix.astype(jnp.bfloat16), np.float32)
    expected, _ = definition(np.asarray(hidden, np.float32), rounded, 1.0, 0.0, None, MASK)
    assert got.logprobs.dtype == jnp.float32
    np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)  # products are exact in float32


@pytest.mark.parametrize("gradient", [False, True])
def test_peak_memory_follows_the_chunk(gradient):
    rows, length, width, vocab = 4, 257, 8, 8192

    def temporary(chunk: int) -> int:
        def scores(hidden, matrix, tokens):
            got = logprobs_from_hidden(hidden, matrix, tokens, temperature=1.0, chunk=chunk)
            return jnp.sum(got.logprobs + got.entropy)

        shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((rows, length, width), (vocab, width))]
        function = jax.grad(scores, (0, 1)) if gradient else scores
        tokens = jax.ShapeDtypeStruct((rows, length), "int32")
        analysis = jax.jit(function).lower(*shapes, tokens).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    whole = rows * (length - 1) * vocab * 4
    small, large = temporary(32), temporary(256)
    fixed = 3 * vocab * width * 4 + 6 * rows * length * width * 4
    assert small < 4 * 32 * vocab * 4 + fixed < whole / 3
    assert large > 3 * small / 2
    assert large < 4 * 256 * vocab * 4 + fixed


def test_sizes_below_one_are_errors():
    arguments = (jnp.asarray(HIDDEN), jnp.asarray(MATRIX), jnp.asarray(TOKENS))
    with pytest.raises(ValueError, match="chunk = 0"):
        logprobs_from_hidden(*arguments, temperature=1.0, chunk=0)
    with pytest.raises(ValueError, match="capacity = 0"):
        logprobs_from_hidden(*arguments, temperature=1.0, mask=jnp.asarray(MASK), capacity=0)


def test_a_row_of_one_token():
    got = logprobs_from_hidden(jnp.zeros((2, 1, D)), jnp.asarray(MATRIX), jnp.zeros((2, 1), int), temperature=1.0)
    assert isinstance(got, Logprobs)
    np.testing.assert_array_equal(got.logprobs, [[0.0], [0.0]])
