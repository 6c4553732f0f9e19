"""Sums over documents in packed rows, by hand and against the same documents in rows of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.aggregate import Aggregation, aggregate
from yatt_jax.ops.documents import aggregate_documents, document_counts, trained_rows, trained_tokens
from yatt_jax.ops.masking import positions_from_segments
from yatt_jax.types import Inputs, Ratio, TextRows

# Two rows: documents of 3 and 2 tokens, then padding; one of 6 tokens.
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
INPUTS = Inputs(SEGMENTS, positions_from_segments(SEGMENTS), SEGMENTS)
MASK = jnp.array([[1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 1]], jnp.float32)
X = jnp.array([[9, 1, 3, 9, 5, 9], [9, 9, 2, 9, 9, 4]], jnp.float32)
ONES = jnp.ones(2)

# Losses that count: [1, 3], [5], [2, 4].
VALUES = [
    (Aggregation(), 15, 5),
    (Aggregation("sequence_mean"), 2 + 5 + 3, 3),
    (Aggregation("sequence_sum"), 15, 3),
    (Aggregation("fixed_length", 4), 15, 12),
]


def test_first_tokens_and_padding_never_count():
    got = trained_tokens(INPUTS, MASK, ONES)
    np.testing.assert_array_equal(got, [[0, 1, 1, 0, 1, 0], [0, 0, 1, 0, 0, 1]])
    np.testing.assert_array_equal(trained_tokens(INPUTS, MASK, jnp.array([0.0, 2.0]))[0], np.zeros(6))
    pair = jax.tree.map(lambda x: jnp.stack([x, x], 1), INPUTS)
    of_pair = trained_tokens(pair, jnp.stack([MASK, MASK], 1), jnp.array([0.0, 1.0]))
    np.testing.assert_array_equal(of_pair[:, 1], trained_tokens(INPUTS, MASK, jnp.array([0.0, 1.0])))


def test_counts():
    np.testing.assert_array_equal(
        document_counts(trained_tokens(INPUTS, MASK, ONES), SEGMENTS), [[2, 2, 2, 1, 1, 0], [2] * 6]
    )


@pytest.mark.parametrize(("options", "total", "weight"), VALUES, ids=lambda x: getattr(x, "how", None))
def test_values(options, total, weight):
    mask = trained_tokens(INPUTS, MASK, ONES)
    got = aggregate_documents(X, mask, SEGMENTS, ONES, options)
    assert (float(got.total), float(got.weight)) == pytest.approx((total, weight))
    # Weights: the first row's documents count twice.
    got = aggregate_documents(X, mask, SEGMENTS, jnp.array([2.0, 1.0]), options)
    doubled = {"token_mean": (24, 8), "sequence_mean": (17, 5), "sequence_sum": (24, 5), "fixed_length": (24, 20)}
    assert (float(got.total), float(got.weight)) == pytest.approx(doubled[options.how])


@pytest.mark.parametrize("options", [options for options, _, _ in VALUES], ids=lambda x: x.how)
def test_one_document_a_row_is_the_plain_aggregation(options):
    segments = jnp.array([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]])
    x, mask = jnp.concatenate([X, X[:1]]), jnp.array([[0, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 1], [0] * 6], jnp.float32)
    got, expected = aggregate_documents(x, mask, segments, jnp.ones(3), options), aggregate(x, mask, options)
    assert (float(got.total), float(got.weight)) == pytest.approx((float(expected.total), float(expected.weight)))


def test_what_does_not_count_may_be_nan():
    mask = trained_tokens(INPUTS, MASK, ONES)
    got = aggregate_documents(jnp.where(mask > 0, X, jnp.nan), mask, SEGMENTS, ONES, Aggregation("sequence_mean"))
    assert float(got.total) == pytest.approx(10)


def test_trained_rows():
    rows, metrics = trained_rows(TextRows(INPUTS, MASK, jnp.array([1.0, 0.0])))
    np.testing.assert_array_equal(rows.mask, [[0, 1, 1, 0, 1, 0], [0] * 6])
    assert isinstance(trained := metrics["trained"], Ratio)
    assert float(trained.mean()) == pytest.approx(3 / 5)
