"""Filters against the reference's warpers, draws against the plain definition, and the edges of both."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from scipy import stats

from yatt_jax.ops.select import Choice, Filters, pack_kept, row_keys, select, uniforms, unpack_kept

V = 300  # two blocks of 128 and a part of a third
LAST = 1 - 2**-24


@functools.partial(jax.jit, static_argnames="record_kept")
def _select(logits: Any, filters: Filters, banned: Any, uniform: Any, *, record_kept: bool = False) -> Choice:
    return select(logits, filters, banned, uniform, record_kept=record_kept)


def make_filters(rows: int, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0) -> Filters:
    def each(value: Any, dtype: Any) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))

    floats = [each(v, jnp.float32) for v in (temperature, top_p, min_p)]
    return Filters(floats[0], each(top_k, jnp.int32), floats[1], floats[2])


def draw(
    logits: np.ndarray, filters: Filters, *, banned: tuple[int, ...] = (), uniform: Any = (0.5, 0.5), kept: bool = True
) -> Choice:
    """Draws for a few rows over at most V entries, as part of a batch of one shape: it compiles once for most tests."""
    rows, vocab = logits.shape
    more = max(0, 8 - rows)
    uniform = jnp.broadcast_to(jnp.asarray(uniform, jnp.float32), (rows, 2))
    full = np.full((rows, V), -np.inf, np.float32)
    full[:, :vocab] = logits
    ids = np.full((rows, 4), V, np.int32)
    ids[:, : len(banned)] = banned
    args = jax.tree.map(lambda x: jnp.concatenate([x, x[:1].repeat(more, 0)]), (full, filters, ids, uniform))
    return jax.tree.map(lambda x: x[:rows], _select(*args, record_kept=kept))


def support(choice: Choice, vocab: int) -> np.ndarray:
    assert choice.kept is not None
    kept = np.asarray(unpack_kept(choice.kept, V))
    assert not kept[:, vocab:].any()
    return kept[:, :vocab]


def warped(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The reference: scores after the warpers, -inf where removed."""
    scores, ids = torch.tensor(logits), torch.zeros((len(logits), 1), dtype=torch.long)
    warpers: list[Any] = [transformers.TemperatureLogitsWarper(temperature)]
    warpers += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [transformers.MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        scores = warper(ids, scores)
    return scores.numpy()


CASES = [
    (1.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.7, 7, 1.0, 0.0),
    (1.3, 200, 1.0, 0.0),
    (1.0, 299, 1.0, 0.0),
    (1.0, 300, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.6, 0, 0.5, 0.0),
    (1.5, 0, 0.999, 0.0),
    (1.0, 0, 0.001, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.3, 0, 1.0, 1.0),
    (0.8, 40, 0.95, 0.02),
    (1.2, 5, 0.7, 0.2),
]


@pytest.mark.parametrize("scale", [0.5, 3.0, 20.0])
def test_kept_sets_are_those_of_the_reference(scale: float) -> None:
    rng = np.random.default_rng(int(scale * 10))
    logits = (rng.normal(size=(len(CASES), 16, V)) * scale).astype(np.float32)
    temperature, top_k, top_p, min_p = (np.repeat([c[i] for c in CASES], 16) for i in range(4))
    choice = draw(logits.reshape(-1, V), make_filters(len(CASES) * 16, temperature, top_k, top_p, min_p))
    kept = support(choice, V).reshape(len(CASES), 16, V)
    for i, case in enumerate(CASES):
        expected = warped(logits[i], *case)
        np.testing.assert_array_equal(kept[i], expected > -np.inf, err_msg=str(case))
        # What was drawn is inside, and its log-probability is the reference's.
        token = np.asarray(choice.token).reshape(-1, 16)[i]
        reference = torch.log_softmax(torch.tensor(expected).double(), -1).numpy()
        sampled = np.asarray(choice.sampled_logprob).reshape(-1, 16)[i]
        np.testing.assert_allclose(sampled, reference[np.arange(16), token], rtol=1e-5, atol=1e-5)


def test_ties_at_the_threshold_are_kept() -> None:
    logits = np.zeros((3, 10), np.float32)
    logits[:, 3], logits[:, 5:8] = 2.0, 1.0
    # Probabilities before normalising: 7.389, three times 2.718, six times 1; sum 21.544.
    choice = draw(logits, make_filters(3, top_k=[2, 0, 0], top_p=[1.0, 0.4, 1.0], min_p=[0.0, 0.0, 0.3679]))
    kept = support(choice, 10)
    np.testing.assert_array_equal(np.flatnonzero(kept[0]), [3, 5, 6, 7])
    np.testing.assert_array_equal(np.flatnonzero(kept[1]), [3, 5, 6, 7])
    np.testing.assert_array_equal(np.flatnonzero(kept[2]), [3])  # e^-1 = .36788 is below .3679
    assert np.isfinite(choice.sampled_logprob).all()


@pytest.mark.parametrize("filled", ["equal", "huge", "tiny", "masked", "denormal"])
def test_threshold_search_ends_on_extreme_logits(filled: str) -> None:
    rng = np.random.default_rng(1)
    normal = rng.normal(size=(6, V)).astype(np.float32)
    logits = {
        "equal": np.zeros((6, V), np.float32),
        "huge": normal * np.float32(1e37),
        "tiny": normal * np.float32(1e-30),
        "denormal": normal * np.float32(1e-42),
        "masked": np.where(rng.random((6, V)) < 0.97, -np.inf, normal).astype(np.float32),
    }[filled]
    filters = make_filters(6, top_k=[5, 0, 5, 0, 299, 1], top_p=[1, 0.9, 0.5, 1, 0.9, 1], min_p=[0, 0, 0, 0.5, 0, 0])
    choice = draw(logits, filters)
    kept = support(choice, V)
    assert np.asarray(choice.valid).all()
    assert kept[np.arange(6), np.asarray(choice.token)].all()
    assert np.isfinite(choice.sampled_logprob).all()
    finite = np.isfinite(logits).sum(-1)
    if filled in ("equal", "denormal"):  # one tie; denormal numbers are zeros to the hardware
        expected = [V] * 6
    elif filled == "tiny":  # equal probabilities, but top-k still tells the logits apart
        expected = [5, V, 5, V, 299, 1]
    elif filled == "huge":
        expected = [5, 1, 1, 1, 1, 1]
    else:
        expected = [min(5, finite[0]), None, None, None, None, 1]
    for row, count in enumerate(expected):
        assert count is None or kept[row].sum() == count, (row, kept[row].sum())


@pytest.mark.parametrize(
    ("case", "banned"), [((1.3, 0, 1.0, 0.0), ()), ((0.8, 50, 0.9, 0.02), ()), ((1.0, 0, 1.0, 0.0), (3, 131, 299))]
)
def test_draws_follow_the_plain_definition(case: tuple[float, int, float, float], banned: tuple[int, ...]) -> None:
    rows, rounds = 4096, 15
    logits = np.random.default_rng(3).normal(size=V).astype(np.float32) * 1.5
    logits[7] = -np.inf
    scores = logits.copy()
    scores[list(banned)] = -np.inf
    weights = np.exp(warped(scores[None], *case)[0].astype(np.float64))
    expected = rounds * rows * weights / weights.sum()
    keys = row_keys(jnp.array([0, 5], jnp.uint32), jnp.arange(rows))
    counts = np.zeros(V)
    for position in range(rounds):
        uniform = uniforms(keys, jnp.full(rows, position))
        choice = draw(np.tile(logits, (rows, 1)), make_filters(rows, *case), banned=banned, uniform=uniform, kept=False)
        counts += np.bincount(np.asarray(choice.token), minlength=V)
    assert counts[expected == 0].sum() == 0
    rare = (expected > 0) & (expected < 8)
    common = expected >= 8
    observed, wanted = list(counts[common]), list(expected[common])
    if expected[rare].sum() > 8:
        observed, wanted = [*observed, counts[rare].sum()], [*wanted, expected[rare].sum()]
    assert len(wanted) > 10
    assert stats.chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue > 1e-3


def test_the_chi_square_test_can_fail() -> None:
    expected = np.full(100, 1000.0)
    skewed = expected + np.where(np.arange(100) % 2, 60, -60)
    assert stats.chisquare(skewed, expected).pvalue < 1e-3


def test_uniforms_at_their_ends_draw_the_first_and_last_kept_entry() -> None:
    logits = np.full((4, V), -np.inf, np.float32)
    logits[:, 130:200] = np.random.default_rng(0).normal(size=(4, 70))
    logits[:, 130], logits[:, 199] = 0.0, 0.0
    uniform = np.array([[0, 0], [LAST, LAST], [0, LAST], [LAST, 0]], np.float32)
    assert np.asarray(draw(logits, make_filters(4), uniform=uniform).token).tolist() == [130, 199, 199, 130]
    choice = draw(logits, make_filters(4, top_k=3), uniform=uniform)
    assert support(choice, V)[np.arange(4), np.asarray(choice.token)].all()


def test_weights_that_round_to_zero_are_not_drawn() -> None:
    # Block 0 and the end of block 2 underflow: exp(-200) is 0 in float32.
    logits = np.full((2, V), -200.0, np.float32)
    logits[:, 140] = 0.0
    choice = draw(logits, make_filters(2), uniform=[[0, 0], [LAST, LAST]])
    assert np.asarray(choice.token).tolist() == [140, 140]
    np.testing.assert_allclose(choice.sampled_logprob, 0.0)


def test_hand_worked_log_probabilities() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32)).repeat(4, 0)
    filters = make_filters(4, temperature=[1, 1, 0, 0.5], top_k=[0, 2, 2, 0])
    choice = draw(logits, filters, uniform=(0.0, 0.7))
    # Rows: p = .25; of {.5, .25} the second, 1/3; the largest, at temperature 1; squares .25, .0625 of .34375.
    assert np.asarray(choice.token).tolist() == [1, 1, 0, 0]
    sampled = np.log([0.25, 1 / 3, 1.0, 0.25 / 0.34375])
    plain = np.log([0.25, 0.25, 0.5, 0.25 / 0.34375])
    np.testing.assert_allclose(choice.sampled_logprob, sampled, atol=1e-6)
    np.testing.assert_allclose(choice.plain_logprob, plain, atol=1e-6)
    assert support(choice, 4).astype(int).tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_banned_entries_are_not_drawn_and_count_in_the_plain_log_probability() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]], np.float32))
    choice = draw(logits, make_filters(2, temperature=[1, 0]), banned=(0,), uniform=(0.0, 0.0))
    assert np.asarray(choice.token).tolist() == [1, 1]
    np.testing.assert_allclose(choice.sampled_logprob, [np.log(0.5), 0.0], atol=1e-6)
    np.testing.assert_allclose(choice.plain_logprob, [np.log(0.25), np.log(0.25)], atol=1e-6)
    assert support(choice, 3).astype(int).tolist() == [[0, 1, 1], [0, 1, 0]]


def test_a_banned_entry_far_above_the_rest_does_not_hide_them() -> None:
    logits = np.zeros((1, V), np.float32)
    logits[0, 4] = 500.0
    choice = draw(logits, make_filters(1), banned=(4,), uniform=(0.5, 0.5))
    np.testing.assert_allclose(choice.sampled_logprob, -np.log(V - 1), rtol=1e-6)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}, {"temperature": 0.0}])
def test_bad_rows_are_flagged_and_leave_their_neighbours_alone(filters: dict[str, float]) -> None:
    good = np.random.default_rng(5).normal(size=(5, V)).astype(np.float32)
    bad = good.copy()
    bad[0, 200], bad[1, 3], bad[2, :] = np.nan, np.inf, -np.inf
    uniform = np.random.default_rng(6).random((5, 2))
    reference = draw(good, make_filters(5, **filters), uniform=uniform)
    choice = draw(bad, make_filters(5, **filters), uniform=uniform)
    assert np.asarray(choice.valid).tolist() == [False, False, False, True, True]
    assert np.asarray(reference.valid).all()
    assert np.isfinite(choice.sampled_logprob).all()
    assert np.isfinite(choice.plain_logprob).all()
    for name in ("token", "sampled_logprob", "plain_logprob", "kept"):
        np.testing.assert_array_equal(getattr(choice, name)[3:], getattr(reference, name)[3:])


def test_a_row_with_everything_banned_is_flagged() -> None:
    choice = draw(np.zeros((1, 3), np.float32), make_filters(1), banned=(0, 1, 2))
    assert not np.asarray(choice.valid)[0]


GOLDEN = (0.36914145946502686, 0.28998470306396484)


def test_random_numbers_belong_to_seed_sample_and_position() -> None:
    seed, ids, positions = jnp.array([1, 2], jnp.uint32), jnp.array([3, 900, 70000]), jnp.array([0, 5, 131072])
    values = np.asarray(uniforms(row_keys(seed, ids), positions))
    np.testing.assert_allclose(values[1], GOLDEN, rtol=0, atol=1e-9)
    order = jnp.array([2, 0, 1])
    np.testing.assert_array_equal(uniforms(row_keys(seed, ids[order]), positions[order]), values[np.asarray(order)])
    for other in ([2, 1], [0, 2], [1, 3]):
        assert (np.asarray(uniforms(row_keys(jnp.array(other, jnp.uint32), ids), positions)) != values).all()
    many = np.asarray(uniforms(row_keys(seed, jnp.arange(4096)), jnp.zeros(4096, jnp.int32))).ravel()
    assert many.min() >= 0
    assert many.max() < 1
    assert stats.kstest(many, "uniform").pvalue > 1e-3


def test_support_as_bits() -> None:
    mask = np.zeros((1, 11), bool)
    mask[0, [0, 3, 8, 10]] = True
    packed = np.asarray(pack_kept(jnp.asarray(mask)))
    assert packed.tolist() == [[0b1001, 0b101]]
    np.testing.assert_array_equal(unpack_kept(jnp.asarray(packed), 11), mask)
    for vocab in (1, 8, 9, 97):
        mask = np.random.default_rng(vocab).random((2, 3, vocab)) < 0.5
        packed = np.asarray(pack_kept(jnp.asarray(mask)))
        np.testing.assert_array_equal(packed, np.packbits(mask, axis=-1, bitorder="little"))
        np.testing.assert_array_equal(unpack_kept(jnp.asarray(packed), vocab), mask)
    with pytest.raises(ValueError, match="13 takes 2"):
        unpack_kept(jnp.zeros((2, 1), jnp.uint8), 13)


def test_values_do_not_recompile() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    traced = []

    @jax.jit
    def run(*args: Any) -> Choice:
        traced.append(1)
        return select(*args)

    for temperature, top_k, top_p, min_p in [*CASES, (0.0, 0, 1.0, 0.0)]:
        filters = make_filters(3, temperature, top_k, top_p, min_p)
        run(jnp.asarray(logits), filters, jnp.full((3, 4), 40), jnp.zeros((3, 2)))
    assert len(traced) == 1
