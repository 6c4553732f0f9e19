"""Before the first update the policy is the reference, at any temperature and under filters."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from tests.controller import tiny
from yatt_jax.controller.online_job import OnlineJob
from yatt_jax.report.metrics import to_floats


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.3, "top_p": 0.9},
        *(pytest.param({"temperature": t}, marks=pytest.mark.slow) for t in (0.6, 1.0, 1.3)),
    ],
    ids=str,
)
def test_kl_is_0_and_the_ratio_1(tmp_path: Path, sampling: dict[str, float]) -> None:
    changes = {f"rollout__sampling__{k}": v for k, v in sampling.items()}
    plan = tiny.plan(tiny.config(tmp_path, parallel__train__data=8, parallel__rollout__data=8, **changes))
    with OnlineJob(plan, tmp_path / "run") as job:
        rollout, samples, rewards = job.collect(0)
        rows, row_rewards = job.place(rollout, rewards)
        scores = {role: job.score(role, rows) for role in job.algo.scored_by(job.config.hyper)}
        batch, facts = job.prepare(rows, row_rewards, scores)
        found = to_floats(facts)
        assert abs(found["kl_k1"]) < 1e-6
        assert abs(found["kl_k3"]) < 1e-6
        assert found["probability_difference"] < 1e-5
        # The sampler's log-probabilities are those of a fresh forward pass, under the same filters.
        sampled = rollout.plain_logprobs if rollout.kept is None else rollout.sampled_logprobs
        fresh = np.asarray(scores["actor"].logprobs)[: len(samples)]
        np.testing.assert_allclose(fresh * rollout.response_mask, sampled, atol=1e-4)
        assert (rollout.kept is not None) == ("top_p" in sampling)
        for minibatch in job.minibatches(batch, 0):
            job.update("actor", minibatch)
        updates = to_floats(job._updates)
        assert abs(updates["actor/ratio_mean"] - 1) < 1e-5
        assert abs(updates["actor/ratio_max"] - 1) < 1e-4
        assert not jax.tree.all(
            jax.tree.map(lambda a, b: bool((a == b).all()), job.states["actor"].params, job.frozen["reference"])
        )
