"""From the host's rows to arrays over the data shards, and from there to minibatches."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import numpy as np

from yatt_jax.controller.plan import Plan
from yatt_jax.types import Rollout


def padded_rows(plan: Plan, rows: int) -> int:
    """Rows of a batch after filling up with rows of zero weight.

    Scoring needs a multiple of shards times micro-batches. A minibatch that has to be filled up takes its filling from
    the end of the batch, so then there is at least one such row.
    """
    unit = plan.train.row_shards * plan.score_micro
    filled = padded_minibatch(plan) > plan.minibatch_rows
    return math.ceil((rows + filled) / unit) * unit


def padded_minibatch(plan: Plan) -> int:
    """Rows of a minibatch after filling up."""
    unit = plan.train.row_shards * plan.micro
    return math.ceil(plan.minibatch_rows / unit) * unit


def place(plan: Plan, rollout: Rollout, rewards: np.ndarray) -> tuple[Rollout, jax.Array]:
    """Fills a rollout up with rows of zero weight and spreads it over the data shards.

    Args:
      plan: the run.
      rollout: host arrays.
      rewards: one a row.

    Returns:
      The rollout and the rewards on the devices. Rows that fill up hold one padding token and reward NaN.
    """
    rows = len(rewards)
    missing = padded_rows(plan, rows) - rows

    def fill(x: np.ndarray) -> np.ndarray:
        return np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))

    filled = jax.tree.map(fill, rollout)
    spread = np.concatenate([np.asarray(rewards, np.float32), np.full(missing, np.nan, np.float32)])
    return jax.device_put((filled, spread), plan.train.rows)


def minibatch_indices(plan: Plan, rows: int, step: int) -> Iterator[np.ndarray]:
    """Which rows each minibatch of a step takes: a new order for every epoch, by seed and step alone.

    The rows chosen do not depend on the number of devices; only the filling at the end does.
    """
    hyper = plan.config.hyper
    size, last = padded_minibatch(plan), padded_rows(plan, rows) - 1
    for epoch in range(hyper.epochs):
        order = np.random.default_rng((plan.config.seed, step, epoch)).permutation(rows)
        for part in np.split(order, hyper.minibatches):
            yield np.concatenate([part, np.full(size - len(part), last)]).astype(np.int32)
