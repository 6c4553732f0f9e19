from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.correction import Correction, importance_weights

# log w: .1, .9, -.5 | 3.0 | nothing counts
TRAINER = jnp.array([[-1.0, -1.0, -2.0, 9.0], [0.0, 9.0, 9.0, 9.0], [1.0, 2.0, 3.0, 4.0]])
SAMPLER = jnp.array([[-1.1, -1.9, -1.5, jnp.nan], [-3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
MASK = jnp.array([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
E = np.exp


@pytest.mark.parametrize(
    ("options", "expected", "cut"),
    [
        (Correction("truncate"), [[E(0.1), 2, E(-0.5), 0], [2, 0, 0, 0]], 2 / 4),
        (Correction("mask"), [[E(0.1), 0, E(-0.5), 0], [0, 0, 0, 0]], 2 / 4),
        (Correction("truncate", limit=3.0), [[E(0.1), E(0.9), E(-0.5), 0], [3, 0, 0, 0]], 1 / 4),
        (Correction("truncate", "sequence_product"), [[E(0.5)] * 3 + [0], [2, 0, 0, 0]], 1 / 4),
        (Correction("mask", "sequence_product", 1.5), [[0] * 4, [0, 0, 0, 0]], 1.0),
        (Correction("mask", "sequence_mean", 1.5), [[E(0.5 / 3)] * 3 + [0], [0, 0, 0, 0]], 1 / 4),
    ],
    ids=str,
)
def test_weights(options, expected, cut):
    weights, found = importance_weights(TRAINER, SAMPLER, MASK, options)
    metrics: Any = found
    expected = np.array([*expected, [0] * 4])
    np.testing.assert_allclose(weights, expected, atol=1e-5)
    assert float(metrics["correction_cut"].mean()) == pytest.approx(cut)
    assert float(metrics["correction_mean"].mean()) == pytest.approx(expected.sum() / 4, abs=1e-5)


def test_the_sampler_agrees_with_the_trainer():
    weights, _ = importance_weights(TRAINER, TRAINER, MASK, Correction("truncate"))
    np.testing.assert_array_equal(weights, MASK)


def test_far_apart_is_finite():
    weights, _ = importance_weights(jnp.array([[1e4, -1e4]]), jnp.zeros((1, 2)), jnp.ones((1, 2)), Correction("mask"))
    np.testing.assert_allclose(weights, [[0.0, E(-20.0)]], atol=1e-12)


def test_faults():
    with pytest.raises(ValueError, match="how = 'clip'"):
        Correction("clip")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="limit = 0: must be above 0"):
        Correction("mask", limit=0)
    with pytest.raises(ValueError, match="level = 'sequence'"):
        Correction("mask", "sequence")  # pyright: ignore[reportArgumentType]
