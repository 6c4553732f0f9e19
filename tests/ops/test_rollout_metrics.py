from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.ops.metrics import explained_variance, rollout_metrics
from yatt_jax.types import Inputs, Logprobs, Metrics, Ratio, Rollout


def facts(kept: bool = False, reference: bool = True, scored: bool = True) -> Metrics:
    """Three rows and one of padding; row 1 has an empty response, row 2 an invalid reward."""
    segments = jnp.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    rollout = Rollout(
        inputs=Inputs(segments, segments, segments),
        response_mask=jnp.array([[0.0, 1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0]]),
        sampled_logprobs=jnp.log(jnp.full((4, 3), 0.75)),
        plain_logprobs=jnp.log(jnp.full((4, 3), 0.5)),
        sample_id=jnp.arange(4),
        group=jnp.arange(4),
        version=jnp.arange(4),
        ended=jnp.array([True, True, False, False]),
        kept=jnp.zeros((4, 3, 1), jnp.uint8) if kept else None,
    )
    actor = Logprobs(jnp.log(jnp.array([[9, 0.5, 0.25]] * 4)), jnp.array([[9.0, 1, 2]] * 4))
    frozen = Logprobs(jnp.log(jnp.array([[9, 0.25, 0.5]] * 4)), jnp.zeros((4, 3)))
    rewards, trained = jnp.array([2.0, 1.0, jnp.nan, jnp.nan]), jnp.array([1.0, 1, 0, 0])
    return rollout_metrics(
        rollout,
        rewards,
        10 * rewards,
        trained,
        actor.logprobs,
        actor if scored else None,
        frozen if reference else None,
    )


def mean(metrics: Metrics, name: str) -> float:
    metric = metrics[name]
    assert isinstance(metric, Ratio)
    return float(metric.mean())


def test_padding_rows_and_invalid_rewards():
    got = facts()
    expected = {
        "reward": 1.5,
        "reward_invalid": 1 / 3,
        "score": 15.0,
        "trained": 2 / 3,
        "response_length": 1.0,
        "ended": 2 / 3,
        "entropy_sampled": 4 / 3,
        "kl_k1": np.log(2.0) / 3,  # ln 2, -ln 2, ln 2
        "kl_k3": (2 * (0.5 - 1 + np.log(2.0)) + (2 - 1 - np.log(2.0))) / 3,
        "kl_response": np.log(2.0) / 3,
    }
    for name, value in expected.items():
        assert mean(got, name) == pytest.approx(value, abs=1e-6), name
    assert "kl_k1" not in facts(reference=False)
    unscored = facts(scored=False)
    assert set(got) - set(unscored) == {"entropy_sampled", "probability_difference"}
    assert mean(unscored, "kl_k1") == pytest.approx(np.log(2.0) / 3, abs=1e-6)


def test_probability_difference_compares_like_with_like():
    assert mean(facts(kept=False), "probability_difference") == pytest.approx((0 + 0.25 + 0) / 3, abs=1e-6)
    assert mean(facts(kept=True), "probability_difference") == pytest.approx((0.25 + 0.5 + 0.25) / 3, abs=1e-6)


def test_explained_variance():
    returns, mask = jnp.array([1.0, 2.0, 3.0, 100.0]), jnp.array([1.0, 1.0, 1.0, 0.0])
    assert float(explained_variance(returns, returns, mask).mean()) == 1.0
    assert float(explained_variance(returns + 5, returns, mask).mean()) == pytest.approx(1.0)
    assert float(explained_variance(jnp.zeros(4), returns, mask).mean()) == pytest.approx(0.0)
    assert float(explained_variance(-returns, returns, mask).mean()) == pytest.approx(-3.0)
    assert float(explained_variance(returns, jnp.ones(4), mask).weight) == 0.0  # nothing to explain: no data
