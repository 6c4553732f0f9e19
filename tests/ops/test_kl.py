from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.kl import KlPenalty, adapted_coefficient, kl


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 1.0), ("k2", 0.5), ("k3", 0.36787944)])
def test_estimators(estimator, expected):
    assert float(kl(jnp.float32(-1.0), jnp.float32(-2.0), estimator)) == pytest.approx(expected, abs=1e-6)
    assert float(kl(jnp.float32(-1.5), jnp.float32(-1.5), estimator)) == 0.0


def test_k3_is_exact_near_zero_and_finite_far_away():
    d = jnp.float32(1e-3)
    assert float(kl(d, jnp.float32(0.0), "k3")) == pytest.approx(4.998333e-07, rel=1e-2)
    value, slope = jax.value_and_grad(lambda x: kl(x, jnp.float32(0.0), "k3"))(-1e4)
    assert jnp.isfinite(value)
    assert jnp.isfinite(slope)


def test_estimators_are_unbiased():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    exact = float(np.sum(p * np.log(p / q)))
    for estimator in ("k1", "k3"):
        values = np.asarray(kl(jnp.log(jnp.asarray(p)), jnp.log(jnp.asarray(q)), estimator))
        assert float(np.sum(p * values)) == pytest.approx(exact, abs=1e-6)


def test_unknown_estimator():
    with pytest.raises(ValueError, match="k4"):
        kl(jnp.float32(0.0), jnp.float32(0.0), "k4")  # pyright: ignore[reportArgumentType]


def test_adapted_coefficient():
    assert adapted_coefficient(0.15, 12.0, target=6.0, rows=64, horizon=10000) == pytest.approx(0.150192, abs=1e-9)
    assert adapted_coefficient(0.15, 0.0, target=6.0, rows=64, horizon=10000) == pytest.approx(0.149808, abs=1e-9)
    assert adapted_coefficient(0.15, 6.6, target=6.0, rows=64, horizon=10000) == pytest.approx(0.150096, abs=1e-9)


def test_penalty_adapts_only_with_a_target():
    assert KlPenalty(coef=0.15).adapted(0.15, 12.0, 64) == 0.15
    adaptive = KlPenalty(coef=0.15, adaptive_target=6.0)
    assert adaptive.adapted(0.15, 12.0, 64) == pytest.approx(0.150192, abs=1e-9)
    assert adaptive.adapted(0.15, float("nan"), 64) == 0.15  # nothing was observed
    with pytest.raises(ValueError, match="adaptive_target needs place"):
        KlPenalty(place="none", adaptive_target=6.0)
