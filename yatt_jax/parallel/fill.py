"""Which rows share a pack, and which packs a micro-batch: host arithmetic on lengths, the same on every process.

A pack is a sequence of fixed length that holds several rows end to end; a micro-batch is a fixed number of packs on
every data shard. How many micro-batches there are follows the shard that needs most, so that shards stay in step.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from yatt_jax.parallel.balance import whole_weights

UNUSED = 2**30  # where a slot without tokens begins: behind every pack


@dataclasses.dataclass(frozen=True)
class MicroShape:
    """Sizes of a micro-batch on one data shard.

    Attributes:
      packs: its packs.
      length: tokens of a pack.
    """

    packs: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens that it has room for."""
        return self.packs * self.length

    @property
    def rows_each(self) -> int:
        """Most rows in a pack: arrays of the loss are as long as the longest possible row for each of them."""
        return max(8, self.length // 32)


@dataclasses.dataclass(frozen=True)
class PackShape:
    """Sizes that are fixed when a program is compiled.

    Attributes:
      large: the micro-batches that most rows are in; no row is longer than their packs.
      small: micro-batches for what is left over when these are full; None: there are none.
    """

    large: MicroShape
    small: MicroShape | None = None

    def held(self, large: int, small: int) -> int:
        """Tokens of so many micro-batches."""
        return large * self.large.tokens + (small * self.small.tokens if self.small else 0)

    def least(self, tokens: int) -> tuple[int, int]:
        """The fewest large and small micro-batches that have room for so many tokens."""
        large, rest = divmod(tokens, self.large.tokens)
        return self.carried(large, -(-rest // self.small.tokens) if self.small else 0, rest)

    def carried(self, large: int, small: int, rest: int = 1) -> tuple[int, int]:
        """The same, with a large micro-batch for small ones that are no less work, or where there are none."""
        if not rest:
            return large, 0
        return (large, small) if self.small and self.held(0, small) < self.large.tokens else (large + 1, 0)


@dataclasses.dataclass(frozen=True)
class Filling:
    """Where every row of a batch lies in the packs of its data shard.

    Attributes:
      order: the slots of each shard in the order of their packs, int32 ``[shards, capacity]``.
      start: where the row of each of these begins, counted over the packs of its shard, ascending; ``UNUSED`` for slots
        without tokens.
      large: large micro-batches.
      small: small micro-batches, after them.
      tokens: tokens of all rows.
      held: tokens that their packs have room for.
      spread: time that shards take in step over the time of their mean: the dearest shard of every micro-batch, summed,
        over the sum of means. 1 is even.
    """

    order: Int[np.ndarray, "S C"]
    start: Int[np.ndarray, "S C"]
    large: int
    small: int
    tokens: int
    held: int
    spread: float

    @property
    def padding(self) -> float:
        """Share of the packs' tokens that no row has."""
        return 1.0 - self.tokens / self.held if self.held else 0.0


def rounded(tokens: int) -> int:
    """Length of arrays that hold ``tokens``: the next multiple of 8, and of larger powers of two (a sixteenth of the
    length or less, at most 128) for longer ones, so that blocks of kernels divide it.
    """
    step = min(max(8, 2 ** (max(tokens, 1).bit_length() - 5)), 128)
    return -(-max(tokens, 1) // step) * step


def pack_shape(budget: int, length: int, capacity: int) -> PackShape:
    """Sizes for micro-batches of at most ``budget`` tokens on a data shard.

    Args:
      budget: at least ``length``.
      length: tokens of a pack.
      capacity: slots of a data shard: it never needs more packs.
    """
    large = MicroShape(max(1, min(budget // length, capacity)), length)
    if large.tokens < 1024:
        return PackShape(large)  # a second copy of the model in the program would cost more than it saves
    if large.packs >= 4:
        return PackShape(large, MicroShape(-(-large.packs // 4), length))
    return PackShape(large, MicroShape(large.packs, -(-length // 32) * 8))


def fill(
    lengths: Int[np.ndarray, "B"],
    costs: Float[np.ndarray, "B"],
    shard: Int[np.ndarray, "B"],
    slot: Int[np.ndarray, "B"],
    shards: int,
    capacity: int,
    shape: PackShape,
) -> Filling:
    """Lays the rows of every data shard into packs.

    Longest rows first, each goes to the pack of its shard that costs least so far and has room (Graham 1969); a shard
    where a row then finds no room is filled again by best fit (Johnson et al. 1974). If that fails as well, every shard
    gets another micro-batch. Packs are dealt to micro-batches in the order of their costs, so that the micro-batches of
    a shard, and those that the shards compute at the same time, cost the same.

    Args:
      lengths: tokens of each row; rows without tokens are in no pack.
      costs: what each row costs, in any unit; see ``balance.row_costs``.
      shard: data shard of each row.
      slot: its place there.
      shards: number of data shards.
      capacity: slots of a data shard.
      shape: sizes of packs and micro-batches.

    Raises:
      ValueError: a row that is longer than a pack.
    """
    lengths, shard, slot = (np.asarray(x, np.int64) for x in (lengths, shard, slot))
    if lengths.max(initial=0) > shape.large.length:
        raise ValueError(f"a row of {lengths.max()} tokens does not fit into packs of {shape.large.length}")
    rows = np.flatnonzero(lengths)
    weights = whole_weights(np.asarray(costs, np.float64))[rows]
    bins = _Bins(lengths[rows], weights, shard[rows], shards)
    tokens = np.bincount(shard[rows], lengths[rows], shards)
    large, small = shape.least(int(tokens.max(initial=0)))
    while (pack := bins.fill(packs := _packs(shape, large, small))) is None:
        large, small = shape.carried(large, small + 1)
    pack, steps = _deal(pack, shard[rows], weights, shards, shape, large, small)
    order, start = _starts(lengths, shard, slot, rows, pack, packs, shards, capacity)
    total = int(tokens.sum())
    return Filling(
        order=order.astype(np.int32),
        start=start.astype(np.int32),
        large=large,
        small=small,
        tokens=total,
        held=shards * shape.held(large, small),
        spread=float(steps.max(axis=0).sum() / steps.mean(axis=0).sum()) if total else 1.0,
    )


def _packs(shape: PackShape, large: int, small: int) -> np.ndarray:
    """Tokens, then rows, that each pack of a shard has room for, ``[2, packs]``."""
    kinds = [(shape.large, large), *([(shape.small, small)] if shape.small else [])]
    columns = [np.full((n * kind.packs, 2), (kind.length, kind.rows_each), np.int64) for kind, n in kinds]
    return np.concatenate(columns).T


class _Bins:
    """Rows (those with tokens) that are laid into packs, all shards at once."""

    def __init__(self, lengths: np.ndarray, weights: np.ndarray, shard: np.ndarray, shards: int):
        self.lengths, self.weights, self.shard, self.shards = lengths, weights, shard, shards
        order = np.lexsort((np.arange(len(shard)), -lengths, shard))
        rank = np.arange(len(order)) - np.searchsorted(shard[order], shard[order])
        by_rank = np.argsort(rank, kind="stable")
        # The longest row of each shard, then the second of each, and so on.
        self.turns = np.split(order[by_rank], np.cumsum(np.bincount(rank))[:-1]) if len(rank) else []

    def fill(self, packs: np.ndarray) -> np.ndarray | None:
        """The pack of each row within its shard, or None where some shard's rows do not fit."""
        pack, failed = self._fill(packs, np.ones(self.shards, bool), by_cost=True)
        if failed.any():
            again, failed_again = self._fill(packs, failed, by_cost=False)
            if failed_again.any():
                return None
            pack = np.where(failed[self.shard], again, pack)
        return pack

    def _fill(self, packs: np.ndarray, chosen: np.ndarray, *, by_cost: bool) -> tuple[np.ndarray, np.ndarray]:
        """Fills the packs of the chosen shards; also says which of them failed."""
        length, most = packs
        count, left = np.zeros((self.shards, len(length)), np.int64), np.tile(length, (self.shards, 1))
        cost = np.zeros((self.shards, len(length)))
        pack, failed = np.full(len(self.shard), -1, np.int64), np.zeros(self.shards, bool)
        for turn in self.turns:
            rows = turn[chosen[self.shard[turn]] & ~failed[self.shard[turn]]]
            s = self.shard[rows]
            room = (left[s] >= self.lengths[rows, None]) & (count[s] < most)
            wish = cost[s] / length if by_cost else left[s]
            best = np.argmin(np.where(room, wish, np.inf), axis=1) if len(length) else np.zeros(len(s), np.int64)
            fits = room.any(axis=1)
            failed[s[~fits]] = True
            rows, s, best = rows[fits], s[fits], best[fits]
            pack[rows] = best
            left[s, best] -= self.lengths[rows]
            cost[s, best] += self.weights[rows]
            count[s, best] += 1
        return pack, failed


def _deal(
    pack: np.ndarray, shard: np.ndarray, weights: np.ndarray, shards: int, shape: PackShape, large: int, small: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers the packs of each shard anew, so that micro-batches get dear and cheap ones alike.

    Returns:
      The pack of each row, and the cost of each micro-batch of each shard, ``[shards, micro-batches]``.
    """
    kinds = [(shape.large.packs, large), *([(shape.small.packs, small)] if shape.small else [])]
    total = sum(packs * count for packs, count in kinds)
    cost = np.zeros((shards, total), np.int64)
    np.add.at(cost, (shard, pack), weights)
    new, steps, begin = np.empty_like(cost), [], 0
    for packs, count in kinds:
        part = slice(begin, begin + packs * count)
        by_cost = np.argsort(-cost[:, part], axis=1, kind="stable")
        # The dearest packs are the first of each micro-batch, the next ones the second of each, and so on.
        number = begin + np.arange(packs * count).reshape(count, packs).T.reshape(-1)
        np.put_along_axis(new[:, part], by_cost, np.broadcast_to(number, by_cost.shape), axis=1)
        sums = np.take_along_axis(cost[:, part], by_cost, axis=1).reshape(shards, packs, count).sum(axis=1)
        steps.append(sums)
        begin = part.stop
    return new[shard, pack], np.concatenate(steps, axis=1)


def _starts(
    lengths: np.ndarray,
    shard: np.ndarray,
    slot: np.ndarray,
    rows: np.ndarray,
    pack: np.ndarray,
    packs: np.ndarray,
    shards: int,
    capacity: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Slots in the order of their packs, and where their rows begin."""
    begin = np.full((shards, capacity), UNUSED, np.int64)
    first_token = np.cumsum(packs[0]) - packs[0]
    place = shard[rows] * packs.shape[1] + pack
    order = np.lexsort((slot[rows], place))
    n = lengths[rows][order]
    before = np.cumsum(n) - n
    first = np.searchsorted(place[order], place[order])  # the first row of the same pack
    begin[shard[rows][order], slot[rows][order]] = first_token[pack[order]] + before - before[first]
    by_begin = np.argsort(begin, axis=1, kind="stable")
    return by_begin, np.take_along_axis(begin, by_begin, axis=1)
