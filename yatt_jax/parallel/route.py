"""How rows travel between devices: host arithmetic on device and row numbers, for ``parallel.exchange``.

A data shard is a group of ``tensor`` neighbouring devices; device d belongs to shard ``d // tensor`` and is its lane
``d % tensor``.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Int


@dataclasses.dataclass(frozen=True)
class Places:
    """Where each filled slot's row comes from and goes to; arrays ``[F]`` over the filled slots, in order.

    Attributes:
      sender: device that sends the row.
      row: place of the row on it.
      device: device that receives the row.
      sent: whether those are two.
      shard: part of the target where the slot lies, and ``place`` in it.
      given: place among the rows that ``device`` gives to its tensor group; -1 where the row is read from the source
        or, without such groups, from what was received.
      devices, rows, slots, tensor: number of devices, rows of a part of the source, slots of a part of the target,
        devices of a tensor group.
      gathered: rows that each device gives to its tensor group.
      replicated: whether every device of a tensor group has the slots of its shard.
    """

    sender: Int[np.ndarray, "F"]
    row: Int[np.ndarray, "F"]
    device: Int[np.ndarray, "F"]
    sent: Bool[np.ndarray, "F"]
    shard: Int[np.ndarray, "F"]
    place: Int[np.ndarray, "F"]
    given: Int[np.ndarray, "F"]
    devices: int
    rows: int
    slots: int
    tensor: int
    gathered: int
    replicated: bool

    def tables(self, received: np.ndarray, gathered: int) -> list[np.ndarray]:
        """What each device gives to its group, ``[devices, gathered]``, and what fills its slots, ``[devices, slots]``.

        An index below ``rows`` reads the source, one from there on what was received or gathered; -1 is empty.

        Args:
          received: place of each sent row in what its device received last.
          gathered: width of the first table, at least ``self.gathered``.
        """
        here = self.row.copy()
        here[self.sent] = self.rows + received
        given = np.full((self.devices, gathered), -1, np.int64)
        grouped = self.given >= 0
        given[self.device[grouped], self.given[grouped]] = here[grouped]
        found = np.where(grouped, self.rows + self.device % self.tensor * gathered + self.given, here)
        slots = np.full((self.devices // self.tensor if self.replicated else self.devices, self.slots), -1, np.int64)
        slots[self.shard, self.place] = found
        return [given, np.repeat(slots, self.devices // len(slots), axis=0)]


@dataclasses.dataclass(frozen=True)
class Route:
    """A way of sending rows in stages.

    Attributes:
      blocks: rows of a block in each stage; 0 where no row needs the stage.
      tables: for each stage ``[devices, digit * block]``, the place that each sent row has in what its device received
        in the stage before (at first: in the source).
      position: place of each row in what its device received last.
    """

    blocks: tuple[int, ...]
    tables: tuple[np.ndarray, ...]
    position: Int[np.ndarray, "F"]


def find_places(
    source: Int[np.ndarray, "S"], rows: int, slots: int, devices: int, tensor: int, shared: tuple[bool, bool]
) -> Places:
    """Decides which device sends and which one receives each row.

    Args:
      source: row of each slot, or -1.
      rows: rows of a part of the source.
      slots: slots of a part of the target.
      devices: number of devices.
      tensor: devices of a tensor group.
      shared: whether the parts of the source are data shards, whose rows lie on every device of a group, or else
        devices; and the same of the target.
    """
    filled = np.flatnonzero(source >= 0)
    part, row = np.divmod(source[filled], max(rows, 1))
    shard, place = np.divmod(filled, slots)
    from_shards, to_shards = shared
    given, gathered = np.full(len(filled), -1, np.int64), 0
    if not to_shards:
        device = shard
        sender = part * tensor + device % tensor if from_shards else part
    elif from_shards:
        # A row of the same shard is there already; of the others, each lane brings in its share.
        far = part != shard
        lane = np.zeros(len(filled), np.int64)
        order = np.flatnonzero(far)
        given[order], lane[order] = np.divmod(ranks(shard[order]), tensor)
        gathered = power_of_two(int(given.max(initial=-1)) + 1)
        sender, device = part * tensor + lane, shard * tensor + lane
    else:
        sender, gathered = part, -(-slots // tensor)
        device = shard * tensor + _lanes(part, shard, devices, tensor, gathered)
        given = ranks(device)
    return Places(
        sender=sender,
        row=row,
        device=device,
        sent=sender != device,
        shard=shard,
        place=place,
        given=given,
        devices=devices,
        rows=rows,
        slots=slots,
        tensor=tensor,
        gathered=gathered,
        replicated=to_shards,
    )


def _lanes(device: np.ndarray, shard: np.ndarray, devices: int, tensor: int, room: int) -> np.ndarray:
    """The lane of its new shard that receives each row, at most ``room`` rows a lane.

    A row keeps the lane it has while there is room, first the rows that are in the shard already; others fill up.
    """
    inside = device // tensor == shard
    wish = shard * tensor + device % tensor
    order = np.lexsort((np.arange(len(wish)), ~inside, wish))
    fits = ranks(wish[order]) < room
    chosen = wish.copy()
    rest = order[~fits]
    free = room - np.bincount(wish[order[fits]], minlength=devices)
    places = np.repeat(np.arange(devices), free)
    first = np.searchsorted(places, shard[rest] * tensor)
    chosen[rest] = places[first + ranks(shard[rest])]
    return chosen % tensor


def find_route(
    sender: Int[np.ndarray, "F"],
    row: Int[np.ndarray, "F"],
    receiver: Int[np.ndarray, "F"],
    digits: tuple[int, ...],
    least: tuple[int, ...],
) -> Route:
    """Sends rows digit by digit of the device number, outermost first.

    Args:
      sender: device of each row.
      row: its place there.
      receiver: device it goes to.
      digits: factors of the device count, outermost first.
      least: smallest block of each stage.
    """
    at, place = sender.copy(), row.copy()
    devices = math.prod(digits)
    blocks, tables = [], []
    for stage, digit in enumerate(digits):
        stride = math.prod(digits[stage + 1 :])
        have, want = at // stride % digit, receiver // stride % digit
        rank = ranks(at * digit + want)
        block = least[stage]
        if block or np.any(have != want):
            block = max(block, power_of_two(int(rank.max(initial=-1)) + 1))
        table = np.zeros((devices, digit * block), np.int64)
        if block:
            table[at, want * block + rank] = place
            # A block arrives in the place of its sender.
            at, place = at + (want - have) * stride, have * block + rank
        blocks.append(block)
        tables.append(table)
    return Route(tuple(blocks), tuple(tables), place)


def ranks(keys: Int[np.ndarray, "F"]) -> Int[np.ndarray, "F"]:
    """How many equal keys stand before each."""
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    rank = np.empty(len(keys), np.int64)
    rank[order] = np.arange(len(keys)) - np.searchsorted(sorted_keys, sorted_keys)
    return rank


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below ``n``; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


def factor(n: int, radix: int) -> tuple[int, ...]:
    """Factors of ``n`` that are at most ``radix`` where its primes are, as large as possible, largest first."""
    factors: list[int] = []
    while n > 1:
        digit = next((d for d in range(min(radix, n), 1, -1) if n % d == 0), None)
        digit = digit or next(d for d in range(2, n + 1) if n % d == 0)
        factors.append(digit)
        n //= digit
    return tuple(sorted(factors, reverse=True)) or (1,)
