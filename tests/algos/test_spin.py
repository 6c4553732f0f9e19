"""SPIN against NumPy in float64, and what its options do."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.algos import spin
from yatt_jax.types import Inputs, Logprobs, Rollout

# Row 0 has its prompt at 0, a response at 1 to 3, the prompt again at 4 and the answer at 5 and 6; and so on.
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 2, 2, 2, 0, 0], [1, 1, 1, 2, 2, 2, 2, 2], [0] * 8])
MASK = np.array([[0, 1, 1, 1, 0, 1, 1, 0], [0, 1, 0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 1, 1, 1], [0] * 8], float)
REWARDS = np.array([0.5, 1.0, np.nan, np.nan])
RNG = np.random.default_rng(0)
REFERENCE, POLICY = (RNG.normal(-1, 0.5, (4, 8)) for _ in range(2))


def outcome(hyper: spin.Hyper, step: int = 0) -> tuple[Any, Any, Any]:
    """Loss, its metrics and those of the rollout."""
    tokens = jnp.ones((4, 8), jnp.int32)
    zeros = jnp.zeros((4, 8))
    rollout = Rollout(
        inputs=Inputs(tokens, tokens, jnp.asarray(SEGMENTS)),
        response_mask=jnp.asarray(MASK, jnp.float32),
        sampled_logprobs=zeros,
        plain_logprobs=zeros,
        sample_id=jnp.arange(4),
        group=jnp.arange(4),
        version=jnp.full(4, spin.iteration_start(hyper, step)),
        ended=jnp.ones(4, bool),
    )
    scores = {"reference": Logprobs(jnp.asarray(REFERENCE, jnp.float32), zeros)}
    batch, facts = spin.prepare(rollout, jnp.asarray(REWARDS, jnp.float32), scores, hyper, jnp.float32(0))
    value, metrics = spin.loss(Logprobs(jnp.asarray(POLICY, jnp.float32), zeros), batch, hyper)
    return float(value.mean()), metrics, facts


def expected(beta: float, *, average: bool = False, sft: float = 0.0) -> float:
    losses = []
    for row in (0, 1):  # the others have no valid reward, or no token
        ratio, nll = {}, {}
        for segment in (1, 2):
            at = (SEGMENTS[row] == segment) & (MASK[row] > 0)
            ratio[segment] = (POLICY - REFERENCE)[row, at].sum() / (at.sum() if average else 1)
            nll[segment] = -POLICY[row, at].mean()
        losses.append(np.log1p(np.exp(-beta * (ratio[2] - ratio[1]))) + sft * nll[2])
    return float(np.mean(losses))


def test_the_answer_is_preferred_to_what_was_sampled() -> None:
    value, metrics, facts = outcome(spin.Hyper(betas=(0.7,)))
    assert value == pytest.approx(expected(0.7), abs=1e-6)
    assert float(facts["beta"].mean()) == pytest.approx(0.7)
    assert float(facts["reward"].mean()) == pytest.approx(0.75)
    assert float(facts["reward_invalid"].mean()) == pytest.approx(1 / 3)
    assert [float(facts[f"{name}_length"].mean()) for name in ("response", "answer")] == [2.0, 2.5]
    assert float(metrics["accuracy"].weight) == 2


def test_each_iteration_has_its_beta_and_the_last_one_stays() -> None:
    hyper = spin.Hyper(betas=(0.5, 2.0), iteration_steps=3)
    assert [spin.iteration_start(hyper, step) for step in range(7)] == [0, 0, 0, 3, 3, 3, 6]
    for step, beta in ((0, 0.5), (2, 0.5), (3, 2.0), (5, 2.0), (6, 2.0), (30, 2.0)):
        assert outcome(hyper, step)[0] == pytest.approx(expected(beta), abs=1e-6)


def test_further_options() -> None:
    plain = spin.Hyper(betas=(0.7,))
    found = outcome(dataclasses.replace(plain, length_average=True))[0]
    assert found == pytest.approx(expected(0.7, average=True), abs=1e-6)
    found = outcome(dataclasses.replace(plain, sft_coef=0.3))[0]
    assert found == pytest.approx(expected(0.7, sft=0.3), abs=1e-6)
    for betas in ((), (0.1, 0.0), (0.1, float("inf"))):
        with pytest.raises(ValueError, match=r"betas = .*: name at least one, all of them above 0"):
            spin.Hyper(betas=betas)
    with pytest.raises(ValueError, match="iteration_steps = 0: must be at least 1"):
        spin.Hyper(iteration_steps=0)
