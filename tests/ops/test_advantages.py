from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.advantages import gae, returns_to_go


def test_hand_worked_values():
    advantages, returns = gae(
        jnp.array([[0.0, 0.0, 1.0]]), jnp.array([[0.1, 0.2, 0.3]]), jnp.ones((1, 3)), gamma=1.0, lam=0.95
    )
    np.testing.assert_allclose(advantages, [[0.82675, 0.765, 0.7]], atol=1e-6)
    np.testing.assert_allclose(returns, [[0.92675, 0.965, 1.0]], atol=1e-6)


def test_gaps_are_stepped_over():
    # The same tokens with a prompt before, two observation tokens between and padding after.
    rewards = jnp.array([[9.0, 0.0, 9.0, 9.0, 0.0, 1.0, 9.0]])
    values = jnp.array([[9.0, 0.1, 9.0, 9.0, 0.2, 0.3, 9.0]])
    mask = jnp.array([[0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]])
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    np.testing.assert_allclose(advantages, [[0, 0.82675, 0, 0, 0.765, 0.7, 0]], atol=1e-6)
    np.testing.assert_allclose(returns, [[0, 0.92675, 0, 0, 0.965, 1.0, 0]], atol=1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (0.99, 0.0), (0.0, 0.5)])
def test_against_the_definition(gamma, lam):
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 3, 8)).astype(np.float32)
    mask = (rng.random((3, 8)) < 0.6).astype(np.float32)
    advantages, returns = gae(jnp.asarray(rewards), jnp.asarray(values), jnp.asarray(mask), gamma=gamma, lam=lam)
    for b in range(3):
        at = np.flatnonzero(mask[b])
        r, v = rewards[b, at].astype(np.float64), values[b, at].astype(np.float64)
        delta = r + gamma * np.append(v[1:], 0.0) - v
        expected = [sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(at))) for i in range(len(at))]
        np.testing.assert_allclose(np.asarray(advantages)[b, at], expected, atol=1e-5)
        np.testing.assert_allclose(np.asarray(returns)[b, at], expected + v, atol=1e-5)
    assert not np.any(np.asarray(advantages)[mask == 0])
    assert not np.any(np.asarray(returns)[mask == 0])


@pytest.mark.parametrize(
    ("gamma", "expected"), [(0.5, [3.0, 4.0, 4.0]), (1.0, [7.0, 6.0, 4.0]), (0.0, [1.0, 2.0, 4.0])]
)
def test_returns_to_go(gamma, expected):
    got = returns_to_go(jnp.array([[1.0, 2.0, 4.0]]), jnp.ones((1, 3)), gamma)
    np.testing.assert_allclose(got, [expected], atol=1e-6)
    gaps = returns_to_go(jnp.array([[9.0, 1.0, 9.0, 2.0, 4.0, 9.0]]), jnp.array([[0.0, 1, 0, 1, 1, 0]]), gamma)
    np.testing.assert_allclose(gaps, [[0, expected[0], 0, expected[1], expected[2], 0]], atol=1e-6)
    assert not returns_to_go(jnp.ones((2, 3)), jnp.zeros((2, 3)), gamma).any()
