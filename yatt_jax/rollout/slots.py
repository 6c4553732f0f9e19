"""Which sample sits in which slot: bookkeeping of the engine, without a device.

Slots lie in lanes, one for each shard of the rows that this process fills; a lane's slots share a device, so that what
one of them holds can be copied to another.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Request:
    """A sample to draw.

    Attributes:
      number: its place among the requests.
      tokens: what stands before the next token, the prompt first.
      key: requests with equal tokens share it.
      written: response tokens among them.
      limit: response tokens at which it is cut.
    """

    number: int
    tokens: Sequence[int]
    key: int
    written: int = 0
    limit: int = 1

    @property
    def cached(self) -> int:
        """Tokens that must be in the cache before decoding: all but the last."""
        return len(self.tokens) - 1


@dataclasses.dataclass(frozen=True)
class Copy:
    """Tokens to copy within a lane, from place ``offset`` of pack, or slot, ``source`` to a slot."""

    lane: int
    source: int
    offset: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens ``begin`` up to ``end`` of a request, to be computed in a slot that holds what comes before."""

    request: Request
    lane: int
    slot: int
    begin: int
    end: int


@dataclasses.dataclass
class Round:
    """What to do before the next chunk, in this order.

    Attributes:
      from_slots: copies of prompts that a slot still holds.
      packs: for each lane its packs, each a list of (request, offset of its tokens).
      from_packs: copies of what was computed in packs.
      pieces: further pieces of long prompts, at most one a lane.
      from_pieces: copies of long prompts that are now complete.
      starts: rows that can be decoded then, as (lane, slot, request).
    """

    from_slots: list[Copy]
    packs: list[list[list[tuple[Request, int]]]]
    from_packs: list[Copy]
    pieces: list[Piece]
    from_pieces: list[Copy]
    starts: list[tuple[int, int, Request]]


@dataclasses.dataclass
class _Filling:
    """A long prompt on its way into a slot, and the slots that wait for it."""

    request: Request
    slot: int
    done: int
    waiting: list[tuple[int, Request]]


class Slots:
    """The slots of one process.

    Args:
      lanes: number of lanes.
      size: slots of each.
      pack: tokens of a pack; longer prompts are computed in pieces of as many.
    """

    def __init__(self, lanes: int, size: int, pack: int):
        self.size = size
        self._pack = pack
        self._free = [list(range(size)) for _ in range(lanes)]
        self._held: list[list[Request | None]] = [[None] * size for _ in range(lanes)]  # whose prompt the cache has
        self._running: list[dict[int, Request]] = [{} for _ in range(lanes)]
        self._filling: list[collections.deque[_Filling]] = [collections.deque() for _ in range(lanes)]
        self.waiting: collections.deque[Request] = collections.deque()

    @property
    def running(self) -> list[tuple[int, int, Request]]:
        """Rows that are decoded, as (lane, slot, request)."""
        return [(lane, slot, r) for lane, rows in enumerate(self._running) for slot, r in rows.items()]

    @property
    def filling(self) -> bool:
        """Whether prompts are on their way in pieces."""
        return any(self._filling)

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return sum(map(len, self._free))

    @property
    def busiest(self) -> int:
        """Rows of the lane that decodes most."""
        return max(map(len, self._running))

    def add(self, requests: Iterable[Request]) -> None:
        """Puts requests at the end of the queue."""
        self.waiting.extend(requests)

    def end(self, lane: int, slot: int, *, clean: bool = True) -> None:
        """Frees a slot; if it is clean, it still holds its prompt for those who want a copy."""
        del self._running[lane][slot]
        if not clean:
            self._held[lane][slot] = None
        self._free[lane].append(slot)

    def plan(self, *, admit: bool) -> Round:
        """Gives free slots to requests, where ``admit`` says so, and takes long prompts a piece further."""
        lanes = len(self._free)
        work = Round([], [[] for _ in range(lanes)], [], [], [], [])
        placed: dict[tuple[int, int], tuple[int, int] | _Filling] = {}  # (lane, key) -> pack and offset, or a filling
        fresh: set[tuple[int, int]] = set()  # slots that get a prompt now: not to be copied from
        # Those that find their prompt in a slot come first: packs may overwrite it.
        while admit and self.waiting and self.free:
            request = self.waiting.popleft()
            lane, slot, source = self._choose(request, placed, fresh)
            self._free[lane].remove(slot)
            if source is not None:
                if source != slot:
                    work.from_slots.append(Copy(lane, source, 0, slot))
                self._start(work, lane, slot, request)
            elif request.cached == 0:
                self._start(work, lane, slot, request)
            else:
                self._compute(work, lane, slot, request, placed)
            fresh.add((lane, slot))
        self._advance(work)
        return work

    def _choose(
        self,
        request: Request,
        placed: dict[tuple[int, int], tuple[int, int] | _Filling],
        fresh: set[tuple[int, int]],
    ) -> tuple[int, int, int | None]:
        """A lane, a free slot in it, and the slot of the lane that holds the prompt already."""
        found: tuple[int, int, int] | None = None
        for lane, free in enumerate(self._free):
            if not free:
                continue
            for slot, held in enumerate(self._held[lane]):
                if held is not None and held.key == request.key and (lane, slot) not in fresh:
                    if slot in free:
                        return lane, slot, slot
                    found = lane, free[0], slot
        if found is not None:
            return found
        beside = [lane for lane, free in enumerate(self._free) if free and (lane, request.key) in placed]
        lane = beside[0] if beside else max(range(len(self._free)), key=lambda lane: len(self._free[lane]))
        return lane, self._free[lane][0], None

    def _start(self, work: Round, lane: int, slot: int, request: Request) -> None:
        self._held[lane][slot] = request
        self._running[lane][slot] = request
        work.starts.append((lane, slot, request))

    def _compute(
        self,
        work: Round,
        lane: int,
        slot: int,
        request: Request,
        placed: dict[tuple[int, int], tuple[int, int] | _Filling],
    ) -> None:
        """Puts a prompt, or its first piece, into a pack, unless one of this round holds it already."""
        where = placed.get((lane, request.key))
        if isinstance(where, _Filling):
            self._held[lane][slot] = None
            where.waiting.append((slot, request))
            return
        long = request.cached > self._pack
        if where is None:
            length = min(request.cached, self._pack)
            packs = work.packs[lane]
            room = [self._pack - sum(min(r.cached, self._pack) for r, _ in pack) for pack in packs]
            fits = [number for number, left in enumerate(room) if left >= length]
            if fits:
                number = min(fits, key=lambda n: room[n])
            else:
                number = len(packs)
                packs.append([])
                room.append(self._pack)
            where = number, self._pack - room[number]
            packs[number].append((request, where[1]))
            if long:
                filling = _Filling(request, slot, self._pack, [])
                self._filling[lane].append(filling)
                placed[lane, request.key] = filling
            else:
                placed[lane, request.key] = where
        work.from_packs.append(Copy(lane, where[0], where[1], slot))
        if long:
            self._held[lane][slot] = None
        else:
            self._start(work, lane, slot, request)

    def _advance(self, work: Round) -> None:
        """The next piece of each lane; a prompt that is complete goes to all who wait for it."""
        for lane, queue in enumerate(self._filling):
            if not queue:
                continue
            first = queue[0]
            end = min(first.done + self._pack, first.request.cached)
            work.pieces.append(Piece(first.request, lane, first.slot, first.done, end))
            first.done = end
            if end == first.request.cached:
                queue.popleft()
                self._start(work, lane, first.slot, first.request)
                for slot, request in first.waiting:
                    work.from_pieces.append(Copy(lane, first.slot, 0, slot))
                    self._start(work, lane, slot, request)

    def shrink(self, size: int) -> list[list[int]]:
        """Keeps ``size`` slots of each lane, the running ones among them; returns their old numbers.

        Only while nothing waits and no prompt is on its way.
        """
        assert not self.waiting
        assert not self.filling
        kept = []
        for lane, running in enumerate(self._running):
            idle = [slot for slot in range(self.size) if slot not in running]
            slots = [*running, *idle][:size]
            kept.append(slots)
            self._running[lane] = {new: running[old] for new, old in enumerate(slots) if old in running}
            self._held[lane] = [self._held[lane][old] for old in slots]
            self._free[lane] = [new for new, old in enumerate(slots) if old not in running]
        self.size = size
        return kept


def sizes(slots: int) -> list[int]:
    """Numbers of slots of a lane that programs are compiled for, descending.

    Beside the whole, of 8 slots or more, the four parts that leave the fewest slots idle while rows with lengths of a
    geometric distribution end one after another, when none is waiting.
    """
    parts = (5 / 8, 3 / 8, 3 / 16, 1 / 16) if slots >= 8 else ()
    return sorted({slots, *(max(2, math.ceil(slots * part)) for part in parts)}, reverse=True)


def pack_counts(slots: int) -> list[int]:
    """Numbers of packs of a lane that prefill is compiled for, ascending: all slots; of many, a 16th and a quarter."""
    return sorted({math.ceil(slots / 16), math.ceil(slots / 4), slots}) if slots >= 8 else [slots]
