"""Losses of preferences against values worked by hand: beta .1, log-ratios 1 and -.5, a true difference of 1.5."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops import preference

BETA, DELTA, GAP = 0.1, jnp.float32(1.5), jnp.float32(1.5)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda: preference.logistic(DELTA, BETA), 0.620957),
        (lambda: preference.logistic(DELTA, BETA, 0.1), 0.635957),
        (lambda: preference.logistic(jnp.float32(0), BETA), 0.693147),
        (lambda: preference.squared_to_margin(DELTA, BETA), 12.25),
        (lambda: preference.squared_to_gap(DELTA, GAP, BETA, 1.0), 1.8225),
        (lambda: preference.squared_to_gap(DELTA, GAP, BETA, 0.5), 0.36),
        (lambda: preference.bernoulli_kl(GAP, BETA * DELTA), 0.173269),
        (lambda: preference.bernoulli_kl(BETA * DELTA, GAP), 0.204926),
        (lambda: preference.bernoulli_kl(GAP, GAP), 0.0),
        (lambda: preference.prospect(jnp.float32(1.0), jnp.bool_(True), jnp.float32(0.3), BETA), 0.482507),
        (lambda: preference.prospect(jnp.float32(-0.5), jnp.bool_(False), jnp.float32(0.3), BETA), 0.480011),
        (lambda: preference.log_odds(jnp.float32(-1.2)), -0.841618),
        (lambda: preference.log1mexp(jnp.float32(-0.1)), -2.352168),  # log(1 - .904837)
        (lambda: preference.log1mexp(jnp.float32(-5.0)), -0.006761),  # log(1 - .006738)
    ],
)
def test_values(loss, expected):
    assert float(loss()) == pytest.approx(expected, abs=2e-6)


def test_extremes_are_finite_with_their_gradients():
    far = jnp.array([-1e4, -80.0, 80.0, 1e4], jnp.float32)
    for function in (
        lambda x: preference.logistic(x, 1.0, 0.1),
        lambda x: preference.bernoulli_kl(x, jnp.zeros_like(x)),
        lambda x: preference.bernoulli_kl(jnp.zeros_like(x), x),
        lambda x: preference.prospect(x, x > 0, jnp.zeros_like(x), 1.0),
    ):
        value, slope = function(far), jax.grad(lambda x, f=function: f(x).sum())(far)
        assert np.all(np.isfinite(value))
        assert np.all(np.isfinite(slope))


def test_log_odds_near_certainty():
    """As log p comes to 0, the gradient grows as 1 / (1 - p) and stays finite; at 0 and beyond it is 0."""
    x = jnp.array([-0.69, -0.70, -1e-2, -1e-4, -2e-6, -1e-7, 0.0, -1e4], jnp.float32)
    value = preference.log_odds(x)
    slope = jax.grad(lambda x: preference.log_odds(x).sum())(x)
    assert np.all(np.isfinite(value))
    assert np.all(np.isfinite(slope))
    exact = 1.0 / -np.expm1(np.asarray(x[:5], np.float64))
    np.testing.assert_allclose(slope[:5], exact, rtol=1e-4)
    np.testing.assert_array_equal(slope[5:7], 0.0)
    assert float(slope[-1]) == 1.0
    np.testing.assert_allclose(value[:3], np.asarray(x[:3]) - np.log(-np.expm1(np.asarray(x[:3], float))), atol=1e-5)
