"""From each process's rows to arrays over the data shards, and from there to minibatches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.plan import Plan, decoder_shape
from yatt_jax.parallel.balance import balance, row_costs
from yatt_jax.parallel.exchange import Plan as Exchange
from yatt_jax.parallel.exchange import exchange, home_shards, plan_exchange
from yatt_jax.parallel.process_rows import from_process_rows, own_values, rows_each
from yatt_jax.types import PyTree, Rollout


def padded_rows(plan: Plan, rows: int, micro: int) -> int:
    """Rows of a batch, filled up to a multiple of data shards times micro-batches."""
    unit = plan.train.row_shards * micro
    return math.ceil(rows / unit) * unit


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where the rows of a step lie. Rows are numbered over all processes, in the order of their samples.

    Attributes:
      slots: slot of each row in the batch.
      costs: estimated cost of each row.
      source: row of each slot in the processes' own order, or -1 (see ``process_rows.own_values``).
      own_rows: rows of this process.
      room: rows that each process makes room for.
      spread: largest over mean cost of a data shard, as the rows were sampled and as they lie now.
      moved: share of the rows that went to another data shard.
    """

    slots: Int[np.ndarray, "B"]
    costs: Float[np.ndarray, "B"]
    source: Int[np.ndarray, "S"]
    own_rows: int
    room: int
    spread: tuple[float, float]
    moved: float


class Mover:
    """Moves rows between the devices of a job; remembers its exchanges so that they compile once."""

    def __init__(self, plan: Plan, hosts: Hosts):
        self._plan, self._hosts = plan, hosts
        self._shape = decoder_shape(plan.models["actor"].config)
        self._like: dict[str, Exchange] = {}

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
        plan, train = self._plan, self._plan.train
        lengths = np.sum(rollout.inputs.segments > 0, axis=1)
        agreed = self._hosts.gather("rows of a step", [lengths.tolist(), rollout.inputs.tokens.shape[1]])
        counts = [len(theirs) for theirs, _ in agreed]
        room = rows_each(max(counts), train)
        numbers = np.concatenate([process * room + np.arange(count) for process, count in enumerate(counts)])
        costs = row_costs(np.concatenate([np.asarray(theirs, np.int64) for theirs, _ in agreed]), self._shape)
        total, places = room * len(counts), padded_rows(plan, len(costs), plan.score_micro)
        assigned = balance(
            costs,
            train.row_shards,
            places // train.row_shards,
            home_shards(total, train)[numbers],
            micro=plan.score_micro,
        )
        source = assigned.source(numbers)
        tree = (widen(rollout, max(width for _, width in agreed)), np.asarray(rewards, np.float32))
        fill = (jax.tree.map(lambda _: 0, rollout), np.nan)
        move = self._plan_exchange("place", source, total, layout="devices")
        rows, row_rewards = exchange(from_process_rows(tree, room, train), move, fill)
        slots = assigned.shard.astype(np.int64) * assigned.capacity + assigned.slot
        placed = Placed(
            slots=slots,
            costs=costs,
            source=source,
            own_rows=counts[self._hosts.process],
            room=room,
            spread=(assigned.before, assigned.after),
            moved=assigned.moved / len(costs),
        )
        return rows, row_rewards, placed

    def minibatches(self, batch: PyTree, placed: Placed, step: int) -> Iterator[PyTree]:
        """The minibatches of a step: every row once an epoch, in a new order each time.

        Which rows a minibatch has depends on seed, step and epoch alone, not on devices or processes; where they lie
        follows their cost.
        """
        plan, total = self._plan, len(placed.source)
        shards = plan.train.row_shards
        capacity = padded_rows(plan, plan.minibatch_rows, plan.micro) // shards
        for rows in minibatch_rows(plan, step):
            slots = placed.slots[rows]
            assigned = balance(placed.costs[rows], shards, capacity, slots // (total // shards), micro=plan.micro)
            source = assigned.source(slots)
            if np.array_equal(source, np.arange(total)):
                yield batch
            else:
                yield exchange(batch, self._plan_exchange("minibatch", source, total, layout="rows"))

    def own(self, values: jax.Array, placed: Placed) -> np.ndarray:
        """What this process's rows got: its part of an array with a value for each slot."""
        return own_values(values, placed.source, placed.room, self._plan.train)[: placed.own_rows]

    def _plan_exchange(self, kind: str, source: np.ndarray, rows: int, *, layout: Any) -> Exchange:
        move = plan_exchange(source, rows, self._plan.train, layout=layout, like=self._like.get(kind))
        self._like[kind] = move
        return move


def minibatch_rows(plan: Plan, step: int) -> Iterator[Int[np.ndarray, "b"]]:
    """The rows of each minibatch of a step, ascending: a new order for every epoch, by seed and step alone."""
    hyper = plan.config.hyper
    for epoch in range(hyper.epochs):
        order = np.random.default_rng((plan.config.seed, step, epoch)).permutation(plan.rows)
        yield from (np.sort(rows) for rows in np.split(order, hyper.minibatches))


def widen(rollout: Rollout, width: int) -> Rollout:
    """Pads rows on the right, so that those of all processes are of one length."""
    missing = width - rollout.inputs.tokens.shape[1]
    if not missing:
        return rollout

    def pad(x: np.ndarray, value: int = 0) -> np.ndarray:
        return np.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=value)

    wide: Any = jax.tree.map(lambda x: pad(x) if x.ndim > 1 else x, dataclasses.replace(rollout, kept=None))
    # Outside the response nothing was filtered: all bits set, as in ``rollout.assemble``.
    return wide if rollout.kept is None else dataclasses.replace(wide, kept=pad(np.asarray(rollout.kept), 0xFF))
