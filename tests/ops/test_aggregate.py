from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.aggregate import Aggregation, aggregate

HOWS = [
    Aggregation("token_mean"),
    Aggregation("sequence_mean"),
    Aggregation("sequence_sum"),
    Aggregation("fixed_length", 4),
]
X = jnp.array([[1.0, 1.0, jnp.nan, 5.0], [0.0, 0.0, 0.0, 0.0]])
MASK = jnp.array([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])


@pytest.mark.parametrize(("how", "expected"), zip(HOWS, [1 / 3, 0.5, 1.0, 0.25], strict=True), ids=lambda v: str(v))
def test_hand_worked_values(how, expected):
    assert float(aggregate(X, MASK, how).mean()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("how", HOWS, ids=lambda v: v.how)
def test_a_row_without_tokens_adds_nothing(how):
    whole = aggregate(jnp.vstack([X, X[:1]]), jnp.vstack([MASK, jnp.zeros((1, 4))]), how)
    alone = aggregate(X, MASK, how)
    assert (whole.total, whole.weight) == (alone.total, alone.weight)
    empty = aggregate(X, jnp.zeros_like(MASK), how)
    assert (empty.total, empty.weight, empty.mean()) == (0.0, 0.0, 0.0)
    slopes = jax.grad(lambda x: aggregate(x, jnp.zeros_like(MASK), how).total)(X)
    np.testing.assert_array_equal(slopes, jnp.zeros_like(X))


@pytest.mark.parametrize("how", HOWS, ids=lambda v: v.how)
def test_sums_over_any_split_give_the_same_mean(how):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(6, 5)), jnp.float32)
    mask = jnp.asarray(rng.random((6, 5)) < 0.5, jnp.float32).at[2].set(0.0)
    whole = aggregate(x, mask, how).mean()
    for cuts in ([3], [1, 2], [2, 3, 5]):
        parts = [aggregate(a, m, how) for a, m in zip(jnp.split(x, cuts), jnp.split(mask, cuts), strict=True)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert float(total.mean()) == pytest.approx(float(whole), abs=1e-6)


def test_length_goes_with_fixed_length():
    with pytest.raises(ValueError, match="length = 0: above 0 with how = 'fixed_length'"):
        Aggregation("fixed_length")
    with pytest.raises(ValueError, match="length = 4"):
        Aggregation("token_mean", 4)
    with pytest.raises(ValueError, match="how = 'mean': expected one of"):
        Aggregation("mean")  # pyright: ignore[reportArgumentType]
