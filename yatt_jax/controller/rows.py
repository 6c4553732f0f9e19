"""From each process's rows to arrays over the data shards, and from there to minibatches in packs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.online_plan import OnlinePlan
from yatt_jax.controller.roles import decoder_shape
from yatt_jax.controller.spread import Placed, Spreader
from yatt_jax.parallel.balance import balance
from yatt_jax.parallel.exchange import exchange
from yatt_jax.parallel.fill import Filling
from yatt_jax.parallel.pack import Packed, place_layout
from yatt_jax.types import PyTree, Rollout


class Mover(Spreader):
    """Moves rows between the devices of a job.

    Attributes:
      filled: what the packs of each minibatch since the last ``place`` held.
    """

    def __init__(self, plan: OnlinePlan, hosts: Hosts):
        shape = decoder_shape(plan.models["actor"].config)
        super().__init__(plan.train, shape, hosts, rows=-(-plan.rows // hosts.count))
        self._plan = plan
        self.filled: list[Filling] = []

    def place(self, rollout: Rollout, rewards: np.ndarray) -> tuple[Rollout, jax.Array, Placed]:
        """Brings the rows of all processes to the data shards, with even cost, filled up with rows of zero weight.

        Tokens and numbers go from device to device; no process sees the rows of another.

        Args:
          rollout: this process's rows, host arrays.
          rewards: one for each.

        Returns:
          The rollout and the rewards on the devices, and where which row lies. Rows that fill up are zeros and have
          reward NaN.
        """
        self.filled = []
        tree = (fit(rollout, self._plan.row_tokens), np.asarray(rewards, np.float32))
        fill_up = (jax.tree.map(lambda _: 0, rollout), np.nan)
        lengths = np.sum(rollout.inputs.segments > 0, axis=1)
        (rows, row_rewards), placed = self.spread(tree, lengths, self._plan.scored, fill_up)
        return rows, row_rewards, placed

    def minibatches(self, batch: PyTree, placed: Placed, step: int) -> Iterator[Packed]:
        """The minibatches of a step in packs: every row once an epoch, in a new order each time.

        Which rows a minibatch has depends on seed, step and epoch alone, not on devices or processes; where they lie
        follows their cost.
        """
        plan, total = self._plan, len(placed.source)
        shards, room = plan.train.row_shards, plan.minibatch
        home = placed.slots // (total // shards)
        for rows in minibatch_rows(plan, step, len(placed.costs)):
            if len(rows) == len(placed.costs):  # all of them: they stay where they are
                moved, assigned = batch, placed.assigned
            else:
                assigned = balance(placed.costs[rows], shards, room.slots, home[rows])
                source = assigned.source(placed.slots[rows])
                moved = exchange(batch, self.plan_exchange("minibatch", source, total, layout="rows"))
            self.filled.append(self.fill(placed.lengths[rows], placed.costs[rows], assigned, room))
            yield Packed(moved, place_layout(self.filled[-1], room.shape, plan.train))


def minibatch_rows(plan: OnlinePlan, step: int, rows: int) -> Iterator[Int[np.ndarray, "b"]]:
    """The rows of each minibatch of a step, ascending: a new order for every epoch, by seed and step alone.

    A step that came short of rows has smaller minibatches, and as many of them unless it has fewer rows than that.
    """
    hyper = plan.config.hyper
    for epoch in range(hyper.epochs):
        order = np.random.default_rng((plan.config.seed, step, epoch)).permutation(rows)
        yield from (np.sort(some) for some in np.array_split(order, hyper.minibatches) if len(some))


def fit(rollout: Rollout, width: int) -> Rollout:
    """Rows in arrays of this length, so that those of all processes and steps are of one; no row is longer."""
    missing = width - rollout.inputs.tokens.shape[1]
    if not missing:
        return rollout

    def change(x: np.ndarray, value: int = 0) -> np.ndarray:
        more = [(0, 0), (0, max(missing, 0))] + [(0, 0)] * (x.ndim - 2)
        return np.pad(x, more, constant_values=value)[:, :width]

    other: Any = jax.tree.map(lambda x: change(x) if x.ndim > 1 else x, dataclasses.replace(rollout, kept=None))
    # Outside the response nothing was filtered: all bits set, as in ``rollout.assemble``.
    return other if rollout.kept is None else dataclasses.replace(other, kept=change(np.asarray(rollout.kept), 0xFF))
