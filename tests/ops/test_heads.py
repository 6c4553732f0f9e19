"""Where outputs of a scalar head are read, by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.heads import OverSteps, at_last_token, over_steps
from yatt_jax.types import Inputs

# Probabilities .9, .5 and .8 at the ends of three steps; a row without any step.
SCORES = jnp.array([[7.0, np.log(9.0), -7.0, 0.0, np.log(4.0), 7.0], [3.0] * 6])
MASK = jnp.array([[0.0, 1, 0, 1, 1, 0], [0.0] * 6])


@pytest.mark.parametrize(("how", "value"), [("min", 0.5), ("mean", 2.2 / 3), ("product", 0.36), ("last", 0.8)])
def test_steps_in_one_number(how: OverSteps, value: float) -> None:
    found = over_steps(SCORES, MASK, how)
    np.testing.assert_allclose(found, [value, np.nan], rtol=1e-6)


def test_the_last_token_is_before_the_padding() -> None:
    segments = jnp.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    scores = jnp.arange(16.0).reshape(2, 4, 2)
    found = at_last_token(scores, Inputs(segments, segments, segments))
    np.testing.assert_array_equal(found, [[4, 5], [14, 15]])
