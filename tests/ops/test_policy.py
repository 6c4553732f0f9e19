from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.policy import Clip, clipped_surrogate, log_ratio, surrogate, surrogate_metrics, value_loss

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
    expected = np.mean([r - 1 - np.log(r) for r in ratios[:6].tolist()])
    assert float(got["kl_update"].mean()) == pytest.approx(expected, abs=1e-6)
    without: Any = surrogate_metrics(jnp.log(ratios), advantages, mask, Clip())
    assert float(without["clip_fraction"].mean()) == pytest.approx(2 / 6)


@pytest.mark.parametrize("dual", [0.0, 3.0])
def test_clip_fraction_is_the_share_without_gradient(dual):
    rng = np.random.default_rng(0)
    logprobs, advantages = jnp.asarray(rng.normal(size=(2, 200)), jnp.float32)
    clip = Clip(low=0.1, high=0.3, dual=dual)
    ones = jnp.ones(200)
    slopes = jax.grad(lambda x: jnp.sum(surrogate(x, jnp.zeros(200), advantages, ones, clip)[0]))(logprobs)
    metrics: Any = surrogate(logprobs, jnp.zeros(200), advantages, ones, clip)[1]
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


def test_dual_clip_below_one_is_an_error():
    with pytest.raises(ValueError, match=r"dual = 0.9: must be above 1, or 0 for off"):
        Clip(dual=0.9)
