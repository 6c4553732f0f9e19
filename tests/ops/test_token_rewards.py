from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.rewards import Shaping, overlong_penalty, shape_scores, token_rewards, trained_rows
from yatt_jax.types import Inputs, Rollout

MASK = jnp.array([[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0]], jnp.float32)
SCORES = jnp.array([1.0, -2.0, 7.0, 0.7])
ENDED = jnp.array([True, False, True, True])
ALL = jnp.ones(4)
LENGTHS = jnp.array([90.0, 70.0, 100.0, 140.0])


def test_score_lands_on_the_last_response_token():
    got = token_rewards(SCORES, MASK, 0.0, whitened=False)
    expected = [[0, 0, 0, 1.0], [0, 0, -2.0, 0], [0, 0, 0, 0], [0, 0, 0.7, 0]]
    np.testing.assert_allclose(got, expected, atol=1e-7)


def test_divergence_is_charged_at_every_response_token():
    kl = jnp.array([[9, 1, 2, 3], [9, 9, 4, 9], [9, 9, 9, 9], [5, 9, 6, jnp.nan]], jnp.float32)
    got = token_rewards(SCORES, MASK, 0.1 * kl, whitened=False)
    expected = [[0, -0.1, -0.2, 0.7], [0, 0, -2.4, 0], [0, 0, 0, 0], [-0.5, 0, 0.1, 0]]
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_empty_response_leaves_its_neighbours_alone():
    with_empty = token_rewards(SCORES, MASK, 0.0, whitened=False)
    without = token_rewards(SCORES.at[2].set(0.0), MASK, 0.0, whitened=False)
    np.testing.assert_array_equal(with_empty, without)
    assert jnp.all(token_rewards(SCORES[2:3], MASK[2:3], 0.0, whitened=True) == 0)


def test_token_whitening_keeps_the_mean():
    got = np.asarray(token_rewards(SCORES, MASK, 0.0, whitened=True))
    counted = np.array([0.0, 0.0, 1.0, -2.0, 0.0, 0.7])  # the six response tokens
    expected = (counted - counted.mean()) / counted.std() + counted.mean()
    np.testing.assert_allclose(got[np.asarray(MASK) > 0], expected, atol=1e-5)
    assert not got[np.asarray(MASK) == 0].any()


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        (Shaping(), [1.0, -2.0, 7.0, 0.7]),
        (Shaping(scale=0.5), [0.5, -1.0, 3.5, 0.35]),
        (Shaping(clip=1.5), [1.0, -1.5, 1.5, 0.7]),
        (Shaping(scale=2.0, clip=3.0), [2.0, -3.0, 3.0, 1.4]),
        (Shaping(missing_eos="subtract", missing_eos_value=1.0), [1.0, -3.0, 7.0, 0.7]),
        (Shaping(missing_eos="replace", missing_eos_value=-4.0), [1.0, -4.0, 7.0, 0.7]),
        (Shaping(overlong_limit=100, overlong_cache=20), [0.5, -2.0, 6.0, -0.3]),
        # Length is charged after the clip, and a replaced score is not charged.
        (Shaping(clip=1.5, overlong_limit=100, overlong_cache=20), [0.5, -1.5, 0.5, -0.3]),
        (Shaping(overlong_limit=70, overlong_cache=1, missing_eos="replace"), [0.0, 1.0, 6.0, -0.3]),
        # The rule for a missing EOS comes after the clip, which cannot take it back.
        (Shaping(clip=1.5, missing_eos="subtract", missing_eos_value=1.0), [1.0, -2.5, 1.5, 0.7]),
    ],
)
def test_shaping(shaping, expected):
    np.testing.assert_allclose(shape_scores(SCORES, ALL, ENDED, LENGTHS, shaping), expected, atol=1e-6)


def test_score_whitening_keeps_the_mean_and_ignores_invalid_rows():
    scores = jnp.array([1.0, jnp.nan, 0.0, 1.0])
    counts = jnp.array([1.0, 0.0, 1.0, 1.0])
    got = shape_scores(scores, counts, ENDED, LENGTHS, Shaping(whiten_scores=True))
    std = np.std([1.0, 0.0, 1.0])
    expected = [(1 - 2 / 3) / std + 2 / 3, 0.0, (0 - 2 / 3) / std + 2 / 3, (1 - 2 / 3) / std + 2 / 3]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_trained_rows():
    segments = jnp.array([[1, 1], [1, 1], [0, 0], [1, 1]])
    zeros = jnp.zeros((4, 2))
    rollout = Rollout(Inputs(segments, segments, segments), zeros, zeros, zeros, *(jnp.zeros(4, int),) * 3, ended=ENDED)
    rewards = jnp.array([jnp.nan, 1.0, 0.0, 1.0])
    np.testing.assert_array_equal(trained_rows(rollout, rewards, False), [0, 1, 0, 1])
    np.testing.assert_array_equal(trained_rows(rollout, rewards, True), [0, 0, 0, 1])


def test_overlong_penalty():
    lengths = jnp.array([0.0, 70.0, 80.0, 81.0, 90.0, 100.0, 101.0, 500.0])
    got = overlong_penalty(lengths, limit=100, cache=20)
    np.testing.assert_allclose(got, [0, 0, 0, -0.05, -0.5, -1, -1, -1], atol=1e-7)
