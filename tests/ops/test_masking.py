from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from yatt_jax.ops.masking import (
    masked_mean,
    masked_ratio,
    masked_sum,
    positions_from_segments,
    segments_from_lengths,
    whiten,
)

X = jnp.array([[1.0, 2.0, jnp.nan], [3.0, jnp.inf, 6.0]])
MASK = jnp.array([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])


def test_what_is_masked_does_not_matter():
    assert masked_sum(X, MASK) == 12.0
    np.testing.assert_array_equal(masked_sum(X, MASK, axis=1), [3.0, 9.0])
    assert masked_mean(X, MASK) == 3.0
    np.testing.assert_array_equal(masked_mean(X, MASK, axis=1), [1.5, 4.5])
    assert (masked_ratio(X, MASK).total, masked_ratio(X, MASK).weight) == (12.0, 4.0)


def test_mean_of_nothing_is_zero():
    assert masked_mean(X, jnp.zeros_like(MASK)) == 0.0
    assert masked_ratio(X, jnp.zeros_like(MASK)).mean() == 0.0


def test_whiten_counts_masked_tokens_only():
    # mean 3, population variance ((-2)^2 + (-1)^2 + 0 + 3^2) / 4 = 3.5
    expected = np.array([[-2.0, -1.0, 0.0], [0.0, 0.0, 3.0]]) / np.sqrt(3.5)
    np.testing.assert_allclose(whiten(X, MASK), expected, atol=1e-6)
    np.testing.assert_allclose(whiten(X, MASK, keep_mean=True), (expected + 3.0) * MASK, atol=1e-6)


def test_whiten_of_equal_values_or_of_one_token_is_finite():
    one = jnp.array([1.0, 0.0])
    np.testing.assert_array_equal(whiten(jnp.array([5.0, 7.0]), one), [0.0, 0.0])
    np.testing.assert_array_equal(whiten(jnp.array([5.0, 7.0]), one, keep_mean=True), [5.0, 0.0])
    np.testing.assert_array_equal(whiten(jnp.array([5.0, 5.0]), jnp.ones(2)), [0.0, 0.0])
    np.testing.assert_array_equal(whiten(jnp.array([5.0, 5.0]), jnp.zeros(2)), [0.0, 0.0])


def test_segments_from_lengths():
    expected = [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    np.testing.assert_array_equal(segments_from_lengths(jnp.array([2, 0, 4]), 4), expected)


def test_positions_count_real_tokens_of_a_segment():
    segments = jnp.array([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 2, 2, 2], [0, 1, 0, 2, 2]])
    expected = [[0, 1, 2, 0, 0], [0, 0, 0, 1, 2], [0, 1, 0, 1, 2], [0, 0, 0, 0, 1]]
    np.testing.assert_array_equal(positions_from_segments(segments), expected)
    np.testing.assert_array_equal(positions_from_segments(segments[:, None]), np.array(expected)[:, None])
