"""From each process's rows to arrays over the data shards, and from there to minibatches in packs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.online_plan import OnlinePlan, Room
from yatt_jax.controller.roles import decoder_shape
from yatt_jax.parallel.balance import Assignment, balance, row_costs
from yatt_jax.parallel.exchange import Plan as Exchange
from yatt_jax.parallel.exchange import exchange, home_shards, plan_exchange
from yatt_jax.parallel.fill import Filling, fill
from yatt_jax.parallel.pack import Layout, Packed, place_layout
from yatt_jax.parallel.process_rows import from_process_rows, own_values, plan_own, rows_each
from yatt_jax.parallel.route import power_of_two
from yatt_jax.types import PyTree, Rollout


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where the rows of a step lie. Rows are numbered over all processes, in the order of their samples.

    Attributes:
      lengths: tokens of each row.
      costs: estimated cost of each row.
      assigned: data shard and slot of each row.
      layout: the packs that they are scored in.
      filled: what these packs hold.
      source: row of each slot in the processes' own order, or -1 (see ``process_rows.own_values``).
      own_rows: rows of this process.
      room: rows that each process makes room for.
    """

    lengths: Int[np.ndarray, "B"]
    costs: Float[np.ndarray, "B"]
    assigned: Assignment
    layout: Layout
    filled: Filling
    source: Int[np.ndarray, "S"]
    own_rows: int
    room: int

    @property
    def slots(self) -> Int[np.ndarray, "B"]:
        """Slot of each row in the batch."""
        return self.assigned.shard.astype(np.int64) * self.assigned.capacity + self.assigned.slot


class Mover:
    """Moves rows between the devices of a job; remembers its exchanges so that they compile once.

    Attributes:
      filled: what the packs of each minibatch since the last ``place`` held.
    """

    def __init__(self, plan: OnlinePlan, hosts: Hosts):
        self._plan, self._hosts = plan, hosts
        self._shape = decoder_shape(plan.models["actor"].config)
        self._like: dict[str, Exchange] = {}
        self._most = -(-plan.rows // hosts.count)  # rows of a process; only grows, so that little compiles anew
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
        plan, train = self._plan, self._plan.train
        self.filled = []
        own = np.sum(rollout.inputs.segments > 0, axis=1)
        agreed = self._hosts.gather("rows of a step", own.tolist())
        counts = [len(theirs) for theirs in agreed]
        self._most = max(self._most, *counts)
        room = rows_each(self._most, train)
        numbers = np.concatenate([process * room + np.arange(count) for process, count in enumerate(counts)])
        lengths = np.concatenate([np.asarray(theirs, np.int64) for theirs in agreed])
        costs, total = row_costs(lengths, self._shape), room * len(counts)
        assigned = balance(costs, train.row_shards, plan.scored.slots, home_shards(total, train)[numbers])
        source = assigned.source(numbers)
        tree = (fit(rollout, plan.row_tokens), np.asarray(rewards, np.float32))
        fill_up = (jax.tree.map(lambda _: 0, rollout), np.nan)
        move = self._plan_exchange("place", source, total, layout="devices")
        rows, row_rewards = exchange(from_process_rows(tree, room, train), move, fill_up)
        filled = self._fill(lengths, costs, assigned, plan.scored)
        placed = Placed(
            lengths=lengths,
            costs=costs,
            assigned=assigned,
            layout=place_layout(filled, plan.scored.shape, train),
            filled=filled,
            source=source,
            own_rows=counts[self._hosts.process],
            room=room,
        )
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
                moved = exchange(batch, self._plan_exchange("minibatch", source, total, layout="rows"))
            self.filled.append(self._fill(placed.lengths[rows], placed.costs[rows], assigned, room))
            yield Packed(moved, place_layout(self.filled[-1], room.shape, plan.train))

    def _fill(self, lengths: np.ndarray, costs: np.ndarray, assigned: Assignment, room: Room) -> Filling:
        return fill(lengths, costs, assigned.shard, assigned.slot, assigned.shards, assigned.capacity, room.shape)

    def own(self, values: jax.Array, placed: Placed) -> np.ndarray:
        """What this process's rows got: its part of an array with a value for each slot."""
        train = self._plan.train
        back = self._remembered("own", lambda like: plan_own(placed.source, placed.room, train, like))
        return own_values(values, back, train)[: placed.own_rows]

    def _plan_exchange(self, kind: str, source: np.ndarray, rows: int, *, layout: Any) -> Exchange:
        train = self._plan.train
        return self._remembered(kind, lambda like: plan_exchange(source, rows, train, layout=layout, like=like))

    def _remembered(self, kind: str, make: Callable[[Exchange | None], Exchange]) -> Exchange:
        """An exchange like the last one of its kind. The first gets twice the room that it needs, and room for a few
        rows at least, so that the lengths of later steps compile nothing.
        """
        like = self._like.get(kind)
        if like is None:
            first = make(None)
            shapes = first.shapes
            idle, few = not any(shapes.blocks), min(8, power_of_two(shapes.rows))
            blocks = tuple(
                max(2 * block, few) if block or (idle and size > 1 and stage < len(shapes.digits) - 1) else 0
                for stage, (size, block) in enumerate(zip(shapes.digits, shapes.blocks, strict=True))
            )
            gathered = 2 * shapes.gathered if all(shapes.shared) else shapes.gathered
            like = dataclasses.replace(first, shapes=dataclasses.replace(shapes, blocks=blocks, gathered=gathered))
        self._like[kind] = make(like)
        return self._like[kind]


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
