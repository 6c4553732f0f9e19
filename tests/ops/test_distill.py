"""Distillation: chunks against whole logits, values by hand, derivatives, and memory that follows the chunk."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.chunks import Readout, map_logits
from yatt_jax.ops.distill import divergence, full_divergence, largest_logits, logits_at, topk_divergence
from yatt_jax.types import LogitsAt

B, T, D, E, V, K = 2, 5, 4, 3, 11, 3
RNG = np.random.default_rng(0)
HIDDEN, TEACHER_HIDDEN = (jnp.asarray(RNG.normal(size=(B, T, n)), jnp.float32) for n in (D, E))
MATRIX, TEACHER = (jnp.asarray(RNG.normal(size=(V, n)), jnp.float32) for n in (D, E))
TOKENS = jnp.asarray(RNG.integers(0, V, (B, T)))
IDS = jnp.asarray(np.stack([RNG.permutation(V)[:K] for _ in range(B * T)]).reshape(B, T, K))
WEIGHTS = jnp.asarray(RNG.normal(size=(B, T, K + 2)), jnp.float32)
CHUNKS = [Readout(2.0, 3), Readout(0.0, 1), Readout(0.0, 100, 2)]
READOUTS = pytest.mark.parametrize("readout", CHUNKS, ids=str)


def whole(hidden, matrix, cap):
    """Logits of all tokens; those of token t stand at t, zeros at 0."""
    z = jnp.einsum("btd,vd->btv", jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0))), matrix)
    return cap * jnp.tanh(z / cap) if cap else z


def plain_at(hidden, matrix, cap):
    z = whole(hidden, matrix, cap)
    lse = jax.nn.logsumexp(z, axis=-1)
    at = jnp.take_along_axis(z, TOKENS[..., None], -1)[..., 0]
    return LogitsAt(jnp.take_along_axis(z, IDS, -1), lse, at - lse)


def total(made: LogitsAt) -> jax.Array:
    parts = jnp.concatenate([made.logits, made.log_sum_exp[..., None], made.logprobs[..., None]], -1)
    return jnp.sum((WEIGHTS * parts)[:, 1:])


@READOUTS
def test_logits_at(readout):
    def ours(hidden, matrix):
        made = logits_at(hidden, matrix, IDS, TOKENS, readout)
        return total(made), made

    (_, made), slopes = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(HIDDEN, MATRIX)
    expected = plain_at(HIDDEN, MATRIX, readout.softcap)
    for got, want in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got[:, 1:], want[:, 1:], atol=1e-5)
        np.testing.assert_array_equal(got[:, 0], 0.0)
    truth = jax.jit(jax.grad(lambda h, m: total(plain_at(h, m, readout.softcap)), (0, 1)))(HIDDEN, MATRIX)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), slopes, truth)
    assert np.abs(slopes[1]).max() > 0.1


def plain_full(hidden, matrix, direction, temperature, cap):
    p, q = (
        jax.nn.log_softmax(whole(h, m, cap) / temperature) for h, m in ((TEACHER_HIDDEN, TEACHER), (hidden, matrix))
    )
    first, second = (p, q) if direction == "forward" else (q, p)
    return temperature**2 * jnp.sum(jnp.exp(first) * (first - second), -1)


@pytest.mark.parametrize(
    ("direction", "temperature", "readout"), [("forward", 2.0, CHUNKS[0]), ("reverse", 1.0, CHUNKS[2])]
)
def test_full_divergence(direction, temperature, readout):
    weights = WEIGHTS[..., 0].at[:, 0].set(0)

    def ours(hidden, matrix):
        made = full_divergence(
            hidden,
            matrix,
            TEACHER_HIDDEN,
            TEACHER,
            TOKENS,
            direction=direction,
            temperature=temperature,
            readout=readout,
            teacher_softcap=readout.softcap,
        )
        return jnp.sum(weights * (made.divergence + made.logprobs)), made

    def truth(hidden, matrix):
        apart = plain_full(hidden, matrix, direction, temperature, readout.softcap)
        return jnp.sum(weights * (apart + plain_at(hidden, matrix, readout.softcap).logprobs)), apart

    (_, made), slopes = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(HIDDEN, MATRIX)
    (_, expected), true_slopes = jax.jit(jax.value_and_grad(truth, (0, 1), has_aux=True))(HIDDEN, MATRIX)
    np.testing.assert_allclose(made.divergence[:, 1:], expected[:, 1:], atol=1e-5)
    assert float(made.divergence[:, 1:].min()) > 0
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), slopes, true_slopes)


def test_largest_logits_of_the_whole_vocabulary_give_the_full_divergence():
    topk, log_sum_exp = jax.jit(lambda: largest_logits(TEACHER_HIDDEN, TEACHER, V, CHUNKS[1]))()
    np.testing.assert_allclose(topk.logits[:, 1:], -np.sort(-whole(TEACHER_HIDDEN, TEACHER, 0.0), -1)[:, 1:], atol=1e-5)
    np.testing.assert_allclose(jax.nn.logsumexp(topk.logits, -1)[:, 1:], log_sum_exp[:, 1:], atol=1e-5)
    student = logits_at(HIDDEN, MATRIX, topk.ids, TOKENS, CHUNKS[1])
    for direction in ("forward", "reverse"):
        got = topk_divergence(student, topk.logits, log_sum_exp, direction=direction, rest="left_out", temperature=1.5)
        np.testing.assert_allclose(got[:, 1:], plain_full(HIDDEN, MATRIX, direction, 1.5, 0.0)[:, 1:], atol=1e-5)


def test_values_of_known_entries():
    """Teacher .5, .25 and .25 of the rest; student .25, .25 and .5."""
    student = LogitsAt(jnp.log(jnp.array([0.25, 0.25])), jnp.float32(0), jnp.float32(0))
    teacher = jnp.log(jnp.array([1.0, 0.5]))  # log-sum-exp log 2
    value = functools.partial(topk_divergence, student, teacher, jnp.log(2.0), temperature=1.0)
    # .5 log 2 + .25 log 1 + .25 log .5, and .25 log .5 + .5 log 2
    assert float(value(direction="forward", rest="one_entry")) == pytest.approx(0.25 * np.log(2), abs=1e-6)
    assert float(value(direction="reverse", rest="one_entry")) == pytest.approx(0.25 * np.log(2), abs=1e-6)
    # Of the two alone: 2/3, 1/3 against 1/2, 1/2.
    forward = 2 / 3 * np.log(4 / 3) + 1 / 3 * np.log(2 / 3)
    assert float(value(direction="forward", rest="left_out")) == pytest.approx(forward, abs=1e-6)
    reverse = 0.5 * np.log(3 / 4) + 0.5 * np.log(3 / 2)
    assert float(value(direction="reverse", rest="left_out")) == pytest.approx(reverse, abs=1e-6)
    # At temperature 2: sqrt 2 to 1 against equal parts, times 4.
    p = np.sqrt(2) / (1 + np.sqrt(2))
    warm = 4 * (p * np.log(2 * p) + (1 - p) * np.log(2 * (1 - p)))
    got = topk_divergence(student, teacher, jnp.log(2.0), direction="forward", rest="left_out", temperature=2.0)
    assert float(got) == pytest.approx(warm, abs=1e-6)


def test_a_teacher_without_a_rest_is_finite():
    teacher = jnp.array([5.0, 1.0, 0.0])
    everything = jax.nn.logsumexp(teacher)

    def value(logits):
        student = LogitsAt(logits, jax.nn.logsumexp(logits), jnp.float32(0))
        return topk_divergence(student, teacher, everything, direction="forward", rest="one_entry", temperature=1.0)

    for logits in (teacher, jnp.array([0.0, 0.0, 0.0]), jnp.array([50.0, 0.0, 0.0])):
        loss, slope = jax.value_and_grad(value)(logits)
        assert np.isfinite(loss)
        assert np.all(np.isfinite(slope))
    assert float(value(teacher)) == pytest.approx(0.0, abs=1e-6)


def test_divergence_of_equals_is_zero():
    x = jax.nn.log_softmax(WEIGHTS)
    np.testing.assert_allclose(divergence(x, x, "forward"), 0.0, atol=1e-6)


def test_leading_axes_and_rows_of_one_token():
    twice = jnp.stack([HIDDEN, HIDDEN], 1)
    made = map_logits(lambda z, *_: z.max(-1), twice, MATRIX, readout=Readout(), per_token=())
    assert made.shape == (B, 2, T)
    np.testing.assert_allclose(made[:, 1, 1:], whole(HIDDEN, MATRIX, 0.0).max(-1)[:, 1:], atol=1e-5)
    one = map_logits(lambda z, *_: z.max(-1), HIDDEN[:, :1], MATRIX, readout=Readout(), per_token=())
    np.testing.assert_array_equal(one, [[0.0], [0.0]])
    with pytest.raises(ValueError, match="chunk = 0"):
        map_logits(lambda z, *_: z.max(-1), HIDDEN, MATRIX, readout=Readout(chunk=0), per_token=())


@pytest.mark.parametrize("gradient", [False, True])
def test_peak_memory_follows_the_chunk(gradient):
    rows, length, width, vocab = 4, 256, 8, 8192

    def temporary(chunk: int) -> int:
        def scores(hidden, matrix, ids, tokens):
            made = logits_at(hidden, matrix, ids, tokens, Readout(chunk=chunk))
            return made.logits.sum() + made.log_sum_exp.sum() + made.logprobs.sum()

        shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((rows, length, width), (vocab, width))]
        integers = [jax.ShapeDtypeStruct(s, "int32") for s in ((rows, length, K), (rows, length))]
        function = jax.grad(scores, (0, 1)) if gradient else scores
        analysis = jax.jit(function).lower(*shapes, *integers).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    whole_logits = rows * length * vocab * 4
    fixed = 3 * vocab * width * 4 + 6 * rows * length * width * 4
    small, large = temporary(32), temporary(256)
    assert small < 6 * 32 * vocab * 4 + fixed < whole_logits / 2
    assert small < large < 6 * 256 * vocab * 4 + fixed
