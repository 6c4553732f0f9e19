"""Sampled rows with scores, and outputs of a policy that has moved since: what tests of online algorithms share."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.algos import best_of_n, cispo, dapo, distill, dr_grpo, grpo, gspo, reinforce_pp, rloo
from yatt_jax.types import Inputs, Logprobs, Rollout

ALGOS: dict[str, Any] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "cispo": cispo,
    "dapo": dapo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "best_of_n": best_of_n,
    "distill": distill,
}
EACH = pytest.mark.parametrize("algo", ALGOS.values(), ids=ALGOS)
RATIOS = pytest.mark.parametrize("algo", [a for a in ALGOS.values() if a is not best_of_n], ids=lambda a: a.__name__)

B, T = 8, 7
RESPONSE = (np.arange(T) >= 2) & (np.arange(T) < np.array([7, 5, 2, 6, 7, 3, 6, 4])[:, None])  # row 2 is empty
GROUP = np.array([0, 1, 0, 1, 0, 1, 1, 0], np.int32)
REWARDS = np.array([1.3, -0.4, 0.9, 0.7, -1.1, 2.5, 0.2, 0.1], np.float32)
ENDED = np.array([True, True, True, True, False, False, True, True])


@functools.cache
def rows() -> tuple[Rollout, dict[str, Any], Logprobs]:
    """A rollout, scores of it by every role, and the policy's outputs now."""
    rng = np.random.default_rng(0)
    table = jnp.ones((B, T), jnp.int32)
    old, reference, teacher, mismatch, moved = (jnp.asarray(rng.normal(size=(B, T)), jnp.float32) for _ in range(5))
    sampled = old - 2 + 0.2 * mismatch
    rollout = Rollout(
        inputs=Inputs(table, table, table),
        response_mask=jnp.asarray(RESPONSE, jnp.float32),
        sampled_logprobs=sampled,
        plain_logprobs=sampled,
        sample_id=jnp.arange(B),
        group=jnp.asarray(GROUP),
        version=jnp.zeros(B, jnp.int32),
        ended=jnp.asarray(ENDED),
    )
    scores = {
        "actor": Logprobs(old - 2, jnp.ones((B, T))),
        "reference": Logprobs(old - 2 + 0.3 * reference, jnp.ones((B, T))),
        "teacher": Logprobs(old - 2 + 0.5 * teacher, jnp.ones((B, T))),
    }
    return rollout, scores, Logprobs(old - 2 + 0.3 * moved, 1 + moved**2)


def prepared(algo: Any, hyper: Any, rewards: Any = REWARDS) -> tuple[Any, dict[str, Any]]:
    """The algorithm's batch of these rows, and its metrics."""
    rollout, scores, _ = rows()
    needed = {role: scores[role] for role in algo.scored_by(hyper)}
    return algo.prepare(rollout, jnp.asarray(rewards, jnp.float32), needed, hyper, jnp.float32(hyper.kl.coef))


def loss(algo: Any, hyper: Any, rewards: Any = REWARDS) -> float:
    """The policy's loss on these rows, with the outputs as they are now."""
    batch, _ = prepared(algo, hyper, rewards)
    return float(algo.LOSSES["actor"](rows()[2], batch, hyper)[0].mean())
