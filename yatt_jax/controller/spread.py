"""Rows of all processes spread over the data shards with even cost, laid into packs; and results back to their owners.

Every process works out the same plan from the lengths that they have told each other; tokens go from device to device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from yatt_jax.controller.hosts import Hosts
from yatt_jax.parallel.balance import Assignment, balance, row_costs
from yatt_jax.parallel.exchange import Plan as Exchange
from yatt_jax.parallel.exchange import exchange, home_shards, plan_exchange
from yatt_jax.parallel.fill import Filling, PackShape, fill, pack_shape
from yatt_jax.parallel.memory import DecoderShape
from yatt_jax.parallel.pack import Layout, place_layout
from yatt_jax.parallel.partition import Partition
from yatt_jax.parallel.process_rows import from_process_rows, own_values, plan_own, rows_each
from yatt_jax.parallel.route import power_of_two
from yatt_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Room:
    """Room for rows on one data shard: ``slots`` rows, and the packs that they are computed in."""

    slots: int
    shape: PackShape

    @classmethod
    def make(cls, rows: int, longest: int, budget: int, pack_tokens: int, partition: Partition) -> Room:
        """Room for so many rows over all data shards.

        Args:
          rows: to make room for.
          longest: tokens of the longest row.
          budget: most tokens of a micro-batch on a data shard; 0: no limit.
          pack_tokens: tokens of a pack; 0: the shortest length that any row fits into and that leaves nothing of the
            budget unused.
          partition: for its data shards.
        """
        shards = partition.row_shards
        # With slots to spare, shards can take as many rows as make their costs even. An empty slot costs next to
        # nothing.
        slots = rows if shards == 1 else math.ceil(rows * 5 / 4 / shards)
        budget = budget or slots * longest
        length = pack_tokens or max(longest, budget // max(1, budget // longest) // 8 * 8)
        return cls(slots, pack_shape(budget, length, slots))


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where rows lie. They are numbered over all processes, in the order in which each process gave them.

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


class Spreader:
    """Spreads rows; remembers its exchanges so that they compile once.

    Args:
      train: the partition whose data shards get the rows.
      shape: of the model that is to compute them, for their cost.
      hosts: this process among those of the job.
      rows: that each process makes room for, at first; more as soon as any of them has more, so that little compiles
        anew.
    """

    def __init__(self, train: Partition, shape: DecoderShape, hosts: Hosts, *, rows: int):
        self._train, self._shape, self._hosts = train, shape, hosts
        self._most = rows
        self._like: dict[str, Exchange] = {}

    def spread(
        self, tree: PyTree, lengths: Int[np.ndarray, "b"], room: Room, fill_up: PyTree | None = None
    ) -> tuple[PyTree, Placed]:
        """Brings the rows of all processes to the data shards, filled up to ``room``.

        Args:
          tree: this process's rows, host arrays ``[b, ...]`` with the same later sizes in every process.
          lengths: tokens of each.
          room: for the rows of all processes.
          fill_up: the same tree with what rows hold that fill up; by default zeros.

        Returns:
          The rows on the devices, and where which of them lies.
        """
        train = self._train
        agreed = self._hosts.gather("rows of a step", np.asarray(lengths).tolist())
        counts = [len(theirs) for theirs in agreed]
        self._most = max(self._most, *counts)
        each = rows_each(self._most, train)
        numbers = np.concatenate([process * each + np.arange(count) for process, count in enumerate(counts)])
        total_lengths = np.concatenate([np.asarray(theirs, np.int64) for theirs in agreed])
        costs, total = row_costs(total_lengths, self._shape), each * len(counts)
        assigned = balance(costs, train.row_shards, room.slots, home_shards(total, train)[numbers])
        source = assigned.source(numbers)
        move = self.plan_exchange("place", source, total, layout="devices")
        moved = exchange(from_process_rows(tree, each, train), move, fill_up)
        filled = self.fill(total_lengths, costs, assigned, room)
        placed = Placed(
            lengths=total_lengths,
            costs=costs,
            assigned=assigned,
            layout=place_layout(filled, room.shape, train),
            filled=filled,
            source=source,
            own_rows=counts[self._hosts.process],
            room=each,
        )
        return moved, placed

    def own(self, values: jax.Array, placed: Placed) -> np.ndarray:
        """What this process's rows got: its part of an array ``[slots, ...]``."""
        back = self._remembered("own", lambda like: plan_own(placed.source, placed.room, self._train, like))
        return own_values(values, back, self._train)[: placed.own_rows]

    def fill(self, lengths: np.ndarray, costs: np.ndarray, assigned: Assignment, room: Room) -> Filling:
        """The packs of assigned rows."""
        return fill(lengths, costs, assigned.shard, assigned.slot, assigned.shards, assigned.capacity, room.shape)

    def plan_exchange(self, kind: str, source: np.ndarray, rows: int, *, layout: Any) -> Exchange:
        """An exchange to the data shards; see ``exchange.plan_exchange``."""
        train = self._train
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
