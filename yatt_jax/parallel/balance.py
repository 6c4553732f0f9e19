"""Which data shard each row of a batch goes to, so that all shards have the same work: host arithmetic on lengths.

Shards wait for the slowest of them, so what is kept small is the largest cost of a shard over the mean. Rows have a
home, the shard where they lie already, and stay there unless that would leave the shards uneven: a moved row costs
bandwidth. Every process computes the same assignment from the same numbers; costs are rounded to whole numbers first,
so that no sum depends on its order or on the machine.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np
from jaxtyping import Float, Int

from yatt_jax.parallel.memory import DecoderShape

RESOLUTION = 2**40  # the dearest row in whole units; a million rows of it still sum within 63 bits


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Where the rows 0 ... B - 1 go.

    Attributes:
      shard: data shard of each row, int32 ``[B]``.
      slot: place within the shard, from 0, int32 ``[B]``. No two rows share a place; empty slots are possible.
      shards: number of shards.
      capacity: slots of a shard.
      before: largest over mean cost of a shard, as the rows lay: at home, or in equal blocks where no home was given.
        1 is even.
      after: the same as assigned.
      moved: rows that change their shard.
    """

    shard: Int[np.ndarray, "B"]
    slot: Int[np.ndarray, "B"]
    shards: int
    capacity: int
    before: float
    after: float
    moved: int

    def source(self, rows: Int[np.ndarray, "B"] | None = None) -> Int[np.ndarray, "S"]:
        """The row that lands in each of the ``shards * capacity`` slots, or -1: what ``exchange.plan_exchange`` reads.

        Args:
          rows: number of each assigned row in the array that is exchanged; 0 ... B - 1 by default.
        """
        filled = np.full(self.shards * self.capacity, -1, np.int64)
        filled[self.shard.astype(np.int64) * self.capacity + self.slot] = (
            np.arange(len(self.shard)) if rows is None else rows
        )
        return filled


def row_costs(lengths: Int[np.ndarray, "B"], shape: DecoderShape) -> Float[np.ndarray, "B"]:
    """Estimated FLOPs of one forward pass over rows of n tokens; a training step takes about three times that.

    ``2 n P + 2 n (n + 1) layers heads head_dim`` with P the weights of the matrices a token meets (the embedding is
    looked up, the output matrix multiplied): every multiply-add counts two, and of the attention matrix only the causal
    half is counted (Kaplan et al. 2020, "Scaling laws for neural language models", section 2.1).

    Args:
      lengths: tokens of each row; 0 costs nothing.
      shape: sizes of the decoder.
    """
    n = np.asarray(lengths, np.float64)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * queries + 2 * keys) + 3 * shape.hidden * shape.mlp
    matrices = shape.layers * layer + shape.hidden * shape.vocab
    return 2.0 * matrices * n + 2.0 * shape.layers * queries * n * (n + 1)


def balance(
    costs: Float[np.ndarray, "B"],
    shards: int,
    capacity: int,
    home: Int[np.ndarray, "B"] | None = None,
    *,
    tolerance: float = 0.02,
) -> Assignment:
    """Gives every row a shard and a slot, with even cost over the shards and few rows moved.

    Without ``home``, rows are dealt out dearest first, each to the cheapest shard with room (Graham 1969). With it,
    rows begin at home, and only those beyond a shard's capacity are dealt out. Then single moves and swaps between the
    dearest shard and a cheap one follow until no shard is above the mean (or above what the dearest row alone forces)
    by more than ``tolerance``, or nothing helps.

    Within a shard, slots follow cost, the dearest row first.

    Args:
      costs: what each row costs, in any unit, not negative.
      shards: number of data shards.
      capacity: rows that fit in a shard.
      home: shard where each row lies.
      tolerance: how far above the mean a shard may stay.

    Returns:
      The assignment: a function of these arguments, ties decided by row number.

    Raises:
      ValueError: more rows than slots, a cost that is negative or not finite, or a home that does not exist.
    """
    costs = np.asarray(costs, np.float64)
    _check(costs, shards, capacity, home)
    rows, weights = len(costs), whole_weights(costs)
    block = max(1, -(-rows // shards))
    begin = np.arange(rows) // block if home is None else np.asarray(home, np.int64)
    table = _Table(weights, shards, capacity)
    if home is None:
        table.deal(np.arange(rows))
    else:
        table.deal(table.settle(begin))
    table.even_out(_goal(weights, shards, capacity, tolerance))
    shard = table.shard_of()
    return Assignment(
        shard=shard.astype(np.int32),
        slot=_slots(weights, shard).astype(np.int32),
        shards=shards,
        capacity=capacity,
        before=_spread(weights, begin, shards),
        after=_spread(weights, shard, shards),
        moved=int(np.count_nonzero(shard != begin)),
    )


def whole_weights(costs: Float[np.ndarray, "B"]) -> Int[np.ndarray, "B"]:
    """Costs as whole numbers of up to ``RESOLUTION``, so that no sum depends on its order or on the machine."""
    dearest = costs.max(initial=0.0)
    if dearest <= 0:
        return np.zeros(len(costs), np.int64)
    return np.rint(costs * (RESOLUTION / dearest)).astype(np.int64)


def _check(costs: np.ndarray, shards: int, capacity: int, home: np.ndarray | None) -> None:
    if costs.ndim != 1 or not np.all(np.isfinite(costs)) or np.any(costs < 0):
        raise ValueError(f"costs are one finite number >= 0 a row, and these are {costs.dtype}{list(costs.shape)}")
    if len(costs) > shards * capacity:
        raise ValueError(f"{len(costs)} rows do not fit in {shards} shards of {capacity}; raise capacity")
    if home is not None:
        home = np.asarray(home)
        if home.shape != costs.shape or np.any(home < 0) or np.any(home >= shards):
            raise ValueError(f"home names a shard 0 ... {shards - 1} for each of {len(costs)} rows")


def _spread(weights: np.ndarray, shard: np.ndarray, shards: int) -> float:
    """Largest over mean cost of a shard; 1 where nothing costs anything."""
    loads = np.zeros(shards, np.int64)
    np.add.at(loads, shard, weights)
    total = int(loads.sum())
    return int(loads.max()) * shards / total if total else 1.0


def _goal(weights: np.ndarray, shards: int, capacity: int, tolerance: float) -> int:
    """The load that need not be lowered: the mean, or the dearest row with the company that full shards force on it."""
    if not len(weights):
        return 0
    company = max(0, len(weights) - (shards - 1) * capacity - 1)
    forced = int(weights.max()) + int(np.sort(weights)[:company].sum())
    return int(max(weights.sum() / shards, forced) * (1 + tolerance))


class _Table:
    """Rows in shards while they are being assigned: ``rows[s, :count[s]]`` are in shard s, which costs ``load[s]``."""

    def __init__(self, weights: np.ndarray, shards: int, capacity: int) -> None:
        self.weights = weights
        self.rows = np.full((shards, capacity), -1, np.int64)
        self.count = np.zeros(shards, np.int64)
        self.load = np.zeros(shards, np.int64)

    def shard_of(self) -> np.ndarray:
        shard = np.empty(len(self.weights), np.int64)
        s, place = np.nonzero(self.rows >= 0)
        shard[self.rows[s, place]] = s
        return shard

    def settle(self, home: np.ndarray) -> np.ndarray:
        """Puts rows at home, dearest first; returns those for which there was no room."""
        order = np.lexsort((np.arange(len(home)), -self.weights, home))
        place = _rank(home[order])
        fits = place < self.rows.shape[1]
        stay = order[fits]
        self.rows[home[stay], place[fits]] = stay
        np.add.at(self.count, home[stay], 1)
        np.add.at(self.load, home[stay], self.weights[stay])
        return order[~fits]

    def deal(self, rows: np.ndarray) -> None:
        """Gives rows, dearest first, to the cheapest shard with room."""
        capacity = self.rows.shape[1]
        heap = [(int(load), s) for s, load in enumerate(self.load) if self.count[s] < capacity]
        heapq.heapify(heap)
        for row in rows[np.lexsort((rows, -self.weights[rows]))].tolist():
            load, s = heap[0]
            self.rows[s, self.count[s]] = row
            self.count[s] += 1
            load += int(self.weights[row])
            self.load[s] = load
            if self.count[s] < capacity:
                heapq.heapreplace(heap, (load, s))
            else:
                heapq.heappop(heap)

    def even_out(self, goal: int) -> None:
        """Moves and swaps between the dearest shard and cheap ones until none is above ``goal``, or nothing helps."""
        tries = 512 + 16 * len(self.load)
        while tries > 0:
            high = int(np.argmax(self.load))
            if self.load[high] <= goal:
                return
            low = int(np.argmin(self.load))
            tries -= 1
            if low == high:
                return
            if self._exchange(high, low, goal):
                continue
            for other in np.argsort(self.load, kind="stable")[1:].tolist():
                tries -= 1
                if tries <= 0 or other == high:
                    return
                if self._exchange(high, other, goal):
                    break

    def _exchange(self, high: int, low: int, goal: int) -> bool:
        """Takes the best move or swap between two shards; False, and nothing done, where none lowers the higher."""
        ours, theirs = self.rows[high, : self.count[high]], self.rows[low, : self.count[low]]
        room = self.count[low] < self.rows.shape[1]
        # The last column stands for no row in return: a move.
        back = np.append(self.weights[theirs], 0) if room else self.weights[theirs]
        change = self.weights[ours][:, None] - back[None, :]
        worst = np.maximum(self.load[high] - change, self.load[low] + change)
        i, j = divmod(int(np.argmin(worst)), worst.shape[1])
        if room:
            move = int(np.argmin(worst[:, -1]))
            if worst[move, -1] <= max(goal, worst[i, j]):
                i, j = move, len(theirs)
        if worst[i, j] >= self.load[high]:
            return False
        given = ours[i]
        if j < len(theirs):
            self.rows[high, i], self.rows[low, j] = theirs[j], given
        else:
            last = self.count[high] - 1
            self.rows[high, i] = self.rows[high, last]
            self.rows[high, last] = -1
            self.rows[low, self.count[low]] = given
            self.count[high] -= 1
            self.count[low] += 1
        self.load[high] -= change[i, j]
        self.load[low] += change[i, j]
        return True


def _rank(keys: np.ndarray) -> np.ndarray:
    """How many equal keys stand before each, in a sorted array."""
    return np.arange(len(keys)) - np.searchsorted(keys, keys, side="left")


def _slots(weights: np.ndarray, shard: np.ndarray) -> np.ndarray:
    """Slots within the shards, the dearest rows first."""
    order = np.lexsort((np.arange(len(shard)), -weights, shard))
    slot = np.empty(len(shard), np.int64)
    slot[order] = _rank(shard[order])
    return slot
