from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.policy import (
    Clip,
    at_level,
    clipped_surrogate,
    clipped_weight,
    log_ratio,
    surrogate,
    surrogate_metrics,
    value_loss,
)

FAR = jnp.float32(-1e3)


def loss(ratio: float, advantage: float, clip: Clip) -> float:
    return float(clipped_surrogate(jnp.log(jnp.float32(ratio)), jnp.float32(advantage), clip))


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip", "expected"),
    [
        (5.0, -1.0, Clip(dual=3.0), 3.0),
        (5.0, -1.0, Clip(), 5.0),
        (5.0, 1.0, Clip(dual=3.0), -1.2),
        (5.0, 1.0, Clip(high=0.28), -1.28),
        (0.5, 1.0, Clip(), -0.5),
        (0.5, -1.0, Clip(), 0.8),
        (0.5, -1.0, Clip(low=0.3), 0.7),
        (1.1, -2.0, Clip(), 2.2),
    ],
)
def test_clipped_surrogate(ratio, advantage, clip, expected):
    assert loss(ratio, advantage, clip) == pytest.approx(expected, abs=1e-5)


def test_log_ratio_is_clamped_before_exp():
    ratios = log_ratio(jnp.array([0.0, -1000.0, 0.5]), jnp.array([-1000.0, 0.0, 0.0]))
    np.testing.assert_array_equal(ratios, [20.0, -20.0, 0.5])
    value, slope = jax.value_and_grad(lambda x: clipped_surrogate(log_ratio(x, FAR), jnp.float32(-1.0), Clip()))(0.0)
    assert jnp.isfinite(value)
    assert slope == 0.0


def test_metrics_count_tokens_that_the_clips_hold_back():
    ratios = jnp.array([1.0, 1.3, 0.7, 1.3, 0.7, 4.0, 100.0])
    advantages = jnp.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0])
    mask = jnp.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    got: Any = surrogate_metrics(jnp.log(ratios), advantages, mask, Clip(dual=3.0))
    assert float(got["clip_fraction"].mean()) == pytest.approx(3 / 6)  # 1.3 up, .7 down, 4.0 by the dual clip
    assert float(got["ratio_mean"].mean()) == pytest.approx(9.0 / 6, abs=1e-6)
    assert float(got["ratio_max"].value) == pytest.approx(4.0, abs=1e-5)
    without: Any = surrogate_metrics(jnp.log(ratios), advantages, mask, Clip())
    assert float(without["clip_fraction"].mean()) == pytest.approx(2 / 6)


@pytest.mark.parametrize("dual", [0.0, 3.0])
def test_clip_fraction_is_the_share_without_gradient(dual):
    rng = np.random.default_rng(0)
    logprobs, advantages = jnp.asarray(rng.normal(size=(2, 1, 200)), jnp.float32)
    clip = Clip(low=0.1, high=0.3, dual=dual)
    zeros, ones = jnp.zeros((1, 200)), jnp.ones((1, 200))
    slopes = jax.grad(lambda x: jnp.sum(surrogate(x, zeros, advantages, ones, clip)[0]))(logprobs)
    metrics: Any = surrogate(logprobs, zeros, advantages, ones, clip)[1]
    assert 0.2 < float(metrics["clip_fraction"].mean()) < 0.8
    assert float(metrics["clip_fraction"].mean()) == pytest.approx(float(jnp.mean(slopes == 0)))


def test_value_loss():
    got, clipped = value_loss(jnp.array([1.5, 1.5]), jnp.array([1.1, 1.1]), jnp.array([1.0, 3.0]), 0.2)
    # v 1.5, v_old 1.1, R 1: max(.5^2, .3^2) / 2; R 3: max(1.5^2, 1.7^2) / 2
    np.testing.assert_allclose(got, [0.125, 1.445], atol=1e-6)
    np.testing.assert_array_equal(clipped, [0.0, 1.0])
    plain, clipped = value_loss(jnp.array([1.5, 1.5]), jnp.array([1.1, 1.1]), jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(plain, [0.125, 1.125], atol=1e-6)
    np.testing.assert_array_equal(clipped, [0.0, 0.0])


LOG_RATIOS = jnp.array([[0.1, -0.2, 0.3, 7.0], [0.5, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
COUNTS = jnp.array([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])


def test_ratio_of_a_sequence():
    ratio = jnp.exp(at_level(LOG_RATIOS, COUNTS, "sequence_mean"))
    np.testing.assert_allclose(ratio, np.outer([1.068939, np.exp(0.5), 1.0], np.ones(4)), atol=1e-5)
    product = at_level(LOG_RATIOS, COUNTS, "sequence_product")
    np.testing.assert_allclose(product, np.outer([0.2, 0.5, 0.0], np.ones(4)), atol=1e-6)
    np.testing.assert_array_equal(at_level(LOG_RATIOS, COUNTS, "token"), LOG_RATIOS)
    far = at_level(jnp.full((1, 4), 15.0), jnp.ones((1, 4)), "sequence_product")
    np.testing.assert_array_equal(far, np.full((1, 4), 20.0))


@pytest.mark.parametrize(("level", "share"), [("sequence_mean", 1 / 3), ("sequence_product", 1.0)])
def test_every_token_of_a_sequence_moves_its_ratio(level, share):
    """The sum over the three tokens is 3 r A, and d r / d logp = r / 3 for the mean, r for the product."""
    clip = Clip(high=1.0, level=level)
    advantages, zeros = jnp.full((3, 4), 2.0), jnp.zeros((3, 4))
    slopes = jax.grad(lambda x: jnp.sum(COUNTS * surrogate(x, zeros, advantages, COUNTS, clip)[0]))(LOG_RATIOS)
    ratio = float(np.exp(0.2 * share))
    np.testing.assert_allclose(slopes[0], [-3 * share * 2 * ratio] * 3 + [0], atol=1e-5)
    np.testing.assert_array_equal(slopes[2], [0.0] * 4)


def test_the_update_is_measured_on_tokens_at_every_level():
    expected = np.mean([np.exp(x) - 1 - x for x in (0.1, -0.2, 0.3, 0.5)])
    for level in ("token", "sequence_mean", "sequence_product"):
        metrics: Any = surrogate(LOG_RATIOS, jnp.zeros((3, 4)), COUNTS, COUNTS, Clip(level=level))[1]
        assert float(metrics["kl_update"].mean()) == pytest.approx(expected, abs=1e-6)


def test_clipped_weight():
    log_ratios = jnp.log(jnp.array([0.5, 1.1, 5.0]))
    logprobs, advantages = jnp.array([-1.0, -2.0, -3.0]), jnp.array([1.0, -1.0, 2.0])
    clip = Clip(how="weight")
    # -w A logp with w = .8, 1.1, 1.2
    np.testing.assert_allclose(clipped_weight(log_ratios, advantages, logprobs, clip), [0.8, -2.2, 7.2], atol=1e-6)

    def total(x):
        return jnp.sum(surrogate(x, logprobs - log_ratios, advantages, jnp.ones(3), clip)[0])

    # The weight is a constant, and no token is without a gradient: -w A.
    np.testing.assert_allclose(jax.grad(total)(logprobs), [-0.8, 1.1, -2.4], atol=1e-6)
    metrics: Any = surrogate_metrics(log_ratios, advantages, jnp.ones(3), clip)
    assert float(metrics["clip_fraction"].mean()) == pytest.approx(2 / 3)


def test_faults_of_a_clip():
    with pytest.raises(ValueError, match=r"dual = 0.9: must be above 1, or 0 for off"):
        Clip(dual=0.9)
    with pytest.raises(ValueError, match=r"dual = 3.0: needs how = 'surrogate'"):
        Clip(dual=3.0, how="weight")
    with pytest.raises(ValueError, match="level = 'sequence': expected one of"):
        Clip(level="sequence")  # pyright: ignore[reportArgumentType]
