"""One batch of samples on its way through the slots: the host's side of the engine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from yatt_jax.ops.select import Filters
from yatt_jax.parallel.local import Group
from yatt_jax.rollout import device
from yatt_jax.rollout.ahead import Ahead
from yatt_jax.rollout.assemble import Result
from yatt_jax.rollout.pace import Chunk
from yatt_jax.rollout.response import Response
from yatt_jax.rollout.sampling import MAX_STOP_IDS, Sampling
from yatt_jax.rollout.slots import Copy, Piece, Request, Round, Slots, pack_counts, sizes
from yatt_jax.rollout.stops import Tokenizer
from yatt_jax.types import Inputs, Params, PyTree


@dataclasses.dataclass
class Counts:
    """What was computed; see ``engine.Stats``."""

    steps: int = 0
    chunks: int = 0
    computed: int = 0
    prompt_tokens: int = 0
    prompt_computed: int = 0


@dataclasses.dataclass(frozen=True)
class _Todo:
    """Numbers that the members of a group agree on before a chunk."""

    clears: int
    from_slots: int
    packs: int
    pieces: int
    from_pieces: int
    starts: int
    running: int
    busiest: int
    more: int
    wanted: int


class Session:
    """Samples one batch of requests.

    While the devices run a chunk, the host reads the text of the one before: a stop string is seen one chunk late,
    which costs steps but changes no result, since a response is cut at its stop string.

    Args:
      programs: of the devices, or what compiles them ahead: then only ``compile`` works.
      group: the processes that sample together.
      tokenizer: for stop strings and completions.
      get: brings this process's rows of results to the host; every member of the group calls it at the same time.
      agree: exchanges numbers with the other members.
      lanes: of this process.
      size: slots of each lane.
      pack: tokens of a pack.
      chunk: most steps of a chunk.
      sampling: sampling parameters; how long a response may be, each request says.
      vocab: vocabulary size.
      seed: of the run.
      sample_ids: of each request.
      begun: of each request, what was written before, or None.

    Attributes:
      size: slots of each lane at the time.
      ended: requests that are done.
      sampled: tokens drawn.
      counts: what was computed.
      paces: how long each chunk took.
    """

    def __init__(
        self,
        programs: device.Programs | Ahead,
        group: Group,
        tokenizer: Tokenizer,
        *,
        get: Callable[[PyTree], PyTree],
        agree: Callable[[list[int]], list[list[int]]],
        lanes: int,
        size: int,
        pack: int,
        chunk: int,
        sampling: Sampling,
        vocab: int,
        seed: int,
        sample_ids: Sequence[int],
        begun: Sequence[Result | None],
    ):
        self._programs, self._group, self._tokenizer = programs, group, tokenizer
        self._get, self._agree = get, agree
        self._lanes, self._pack, self._chunk = lanes, pack, chunk
        self._sampling, self._vocab = sampling, vocab
        self._sample_ids, self._begun = sample_ids, begun
        self._seed = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
        self._slots = Slots(lanes, size, pack)
        self._sizes, self._packs = sizes(size), pack_counts(size)
        self._rows: dict[tuple[int, int], Response] = {}
        self._unread: list[Response] = []
        self._halted: set[tuple[int, int]] = set()
        self._dirty: set[tuple[int, int]] = set()  # slots of rows that were not numbers
        self.ended, self.sampled, self.counts = 0, 0, Counts()
        self.paces: list[Chunk] = []
        self._devices = group.partition.mesh.size / len(group.members)
        # Slots and packs are numbered within a row shard; several processes that sample together share one.
        self._lanes_before = [0 if group.alone else group.rank * lanes + lane for lane in range(lanes)]

    @property
    def size(self) -> int:
        """Slots of each lane."""
        return self._slots.size

    def compile(self, params: Params, *, long: bool) -> None:
        """Calls every program once, on nothing, so that none compiles later; ``long`` prompts need pieces."""
        programs = self._programs
        layers = programs.lay_out(params)
        caches, rows = programs.start()
        nothing = Slots(self._lanes, self.size, self._pack).plan(admit=False)
        for count in self._packs:
            caches = self._prefill(params, layers, caches, nothing, count)
        caches = programs.copy(caches, self._copies([], 0))
        if long:
            caches = self._extend(params, layers, caches, [])
        rows = self._admit(rows, [])
        size = self.size
        for smaller in self._sizes:
            if smaller < size:
                kept = [list(range(smaller))] * self._lanes
                caches, rows = programs.pick(caches, rows, self._numbers(kept, size))
            size = smaller
            halt, none = self._group.put(np.zeros(size * self._lanes, bool)), np.int32(0)
            caches, rows, *_ = programs.decode(
                params, layers, caches, rows, self._controls(size), halt, none, np.int32(1)
            )
        self._get((rows.reason,))

    def run(
        self,
        params: Params,
        requests: Sequence[Request],
        ended: Callable[[int, Result], None],
        progress: Callable[[], None],
        *,
        enough: Callable[[int], bool] | None = None,
    ) -> dict[int, Result]:
        """Samples all requests, or as far as they come.

        Args:
          params: the weights.
          requests: what to sample.
          ended: called with number and result of each as it ends.
          progress: called after each chunk, and at the end.
          enough: asked before each chunk, with the decode steps so far: whether to stop. Processes that sample together
            stop when all say so.

        Returns:
          The results, by number; those of requests that were not done have finish "unfinished".
        """
        programs, slots, results = self._programs, self._slots, {}
        slots.add(requests)
        layers = programs.lay_out(params)
        caches, rows = programs.start()
        controls = self._controls(self.size)
        begun, admitted = time.perf_counter(), 0
        while True:
            wanted = True
            if enough is not None:
                self._read(results, ended)  # it is asked what has ended, not what had a chunk ago
                wanted = not enough(self.counts.steps)
            work = slots.plan(admit=wanted and (not slots.running or slots.free >= self._patience))
            todo = self._meet(work, wanted)
            if not todo.wanted or not (todo.running or todo.more):
                break
            caches, rows = self._fill(params, layers, caches, rows, work, todo)
            admitted += len(work.starts)
            if not todo.running:
                continue
            smaller = min(size for size in self._sizes if size >= todo.busiest)
            if smaller < self.size and not todo.more:
                caches, rows = self._shrink(caches, rows, smaller)
                controls = self._controls(smaller)
            patience = np.int32(self._patience if todo.more else 2**31 - 1)
            halt = self._group.put(self._halts())
            caches, rows, steps, _, drawn = programs.decode(
                params, layers, caches, rows, controls, halt, np.int32(self._chunk), patience
            )
            self._read(results, ended)  # while the devices decode
            size, waiting = self.size * self._lanes, len(slots.waiting)
            self._take(int(steps), *self._get((rows.reason, drawn)))
            now = time.perf_counter()
            self.paces.append(Chunk(size / self._devices, int(steps), now - begun, admitted, waiting))
            begun, admitted = now, 0
            progress()
        self._read(results, ended)
        progress()
        unfinished = {row.request.number: row for row in self._rows.values()}
        for request in requests:
            if request.number not in results:
                row = unfinished.get(request.number) or self._response(request)
                results[request.number] = row.result(self._tokenizer)
        return results

    def _response(self, request: Request) -> Response:
        return Response(request, self._begun[request.number])

    def _meet(self, work: Round, wanted: bool) -> _Todo:
        """What some member of the group has to do before the next chunk, so that all call the same programs."""
        slots = self._slots
        own = _Todo(
            clears=len(self._dirty),
            from_slots=len(work.from_slots),
            packs=max(map(len, work.packs)),
            pieces=len(work.pieces),
            from_pieces=len(work.from_pieces),
            starts=len(work.starts),
            running=len(slots.running),
            busiest=slots.busiest,
            more=int(bool(slots.waiting) or slots.filling),
            wanted=int(wanted),
        )
        everyone = self._agree(list(dataclasses.astuple(own)))
        return _Todo(*map(max, zip(*everyone, strict=True)))

    def _fill(
        self, params: Params, layers: PyTree, caches: device.Caches, rows: device.Rows, work: Round, todo: _Todo
    ) -> tuple[device.Caches, device.Rows]:
        """Brings prompts into slots and starts their rows."""
        if todo.clears:
            dirty = np.zeros(self._lanes * self.size, bool)
            dirty[[lane * self.size + slot for lane, slot in self._dirty]] = True
            caches, self._dirty = self._programs.clear(caches, self._group.put(dirty)), set()
        if todo.from_slots:
            caches = self._programs.copy(caches, self._copies(work.from_slots, self.size))
        if todo.packs:
            count = min(count for count in self._packs if count >= todo.packs)
            caches = self._prefill(params, layers, caches, work, count)
        if todo.pieces:
            caches = self._extend(params, layers, caches, work.pieces)
        if todo.from_pieces:
            caches = self._programs.copy(caches, self._copies(work.from_pieces, self.size))
        if todo.starts:
            rows = self._admit(rows, work.starts)
            for lane, slot, request in work.starts:
                self._rows[lane, slot] = self._response(request)
        return caches, rows

    def _prefill(self, params: Params, layers: PyTree, caches: device.Caches, work: Round, count: int) -> device.Caches:
        """Computes packs, ``count`` of them in each lane, and copies their prompts to the slots."""
        tokens, positions, segments = np.zeros((3, self._lanes, count, self._pack), np.int32)
        for lane, packs in enumerate(work.packs):
            for number, pack in enumerate(packs):
                for segment, (request, offset) in enumerate(pack, 1):
                    length = min(request.cached, self._pack)
                    there = lane, number, slice(offset, offset + length)
                    tokens[there], positions[there] = request.tokens[:length], np.arange(length)
                    segments[there] = segment
                    self.counts.prompt_tokens += length
        self.counts.prompt_computed += tokens.size if any(work.packs) else 0
        flat = [self._group.put(x.reshape(-1, self._pack)) for x in (tokens, positions, segments)]
        return self._programs.prefill(params, layers, caches, Inputs(*flat), self._copies(work.from_packs, count))

    def _extend(self, params: Params, layers: PyTree, caches: device.Caches, pieces: Sequence[Piece]) -> device.Caches:
        """Computes a further piece of a prompt in each lane that has one."""
        tokens = np.zeros((self._lanes, self._pack), np.int32)
        # A lane without a piece writes past the end of its first slot: nothing.
        start, slot = np.full(self._lanes, self._programs.capacity, np.int32), np.zeros(self._lanes, np.int32)
        for piece in pieces:
            tokens[piece.lane, : piece.end - piece.begin] = piece.request.tokens[piece.begin : piece.end]
            start[piece.lane], slot[piece.lane] = piece.begin, piece.slot
            self.counts.prompt_tokens += piece.end - piece.begin
            self.counts.prompt_computed += self._pack
        slot += np.array(self._lanes_before, np.int32) * self.size
        put = self._group.put
        return self._programs.extend(params, layers, caches, put(tokens), put(start), put(slot))

    def _copies(self, copies: Sequence[Copy], sources: int) -> device.Copies:
        """The copies of each lane; a row shard has ``sources`` packs or slots for each of its lanes."""
        source, offset, slot = np.zeros((3, self._lanes, self.size), np.int32)
        count = np.zeros(self._lanes, np.int32)
        for copy in copies:
            at, before = (copy.lane, count[copy.lane]), self._lanes_before[copy.lane]
            source[at], offset[at] = before * sources + copy.source, copy.offset
            slot[at] = before * self.size + copy.slot
            count[copy.lane] += 1
        put = self._group.put
        return device.Copies(put(source), put(offset), put(slot), put(count))

    def _admit(self, rows: device.Rows, starts: Sequence[tuple[int, int, Request]]) -> device.Rows:
        new = np.zeros(self._lanes * self.size, bool)
        token, position, count, limit, sample_id = numbers = np.zeros((5, len(new)), np.int32)
        for lane, slot, request in starts:
            at = lane * self.size + slot
            new[at], token[at], position[at] = True, request.tokens[-1], request.cached
            count[at], limit[at], sample_id[at] = request.written, request.limit, self._sample_ids[request.number]
        admission = device.Admission(*(self._group.put(x) for x in (new, *numbers)))
        return self._programs.admit(rows, admission, self._seed)

    def _shrink(self, caches: device.Caches, rows: device.Rows, size: int) -> tuple[device.Caches, device.Rows]:
        """Goes on with ``size`` slots a lane."""
        before, kept = self.size, self._slots.shrink(size)
        now = {(lane, old): (lane, new) for lane, slots in enumerate(kept) for new, old in enumerate(slots)}
        self._rows = {now[at]: row for at, row in self._rows.items()}
        self._halted = {now[at] for at in self._halted if at in now}
        self._dirty = {now[at] for at in self._dirty if at in now}
        return self._programs.pick(caches, rows, self._numbers(kept, before))

    def _numbers(self, kept: Sequence[Sequence[int]], size: int) -> Any:
        """Slots of each lane, by their numbers in the row shard."""
        numbers = [np.asarray(slots) + before * size for slots, before in zip(kept, self._lanes_before, strict=True)]
        return self._group.put(np.concatenate(numbers).astype(np.int32))

    def _halts(self) -> np.ndarray:
        """Marks rows that the devices still run, and that are not wanted any more."""
        halt = np.zeros(self._lanes * self.size, bool)
        for lane, slot in self._halted - self._rows.keys():
            halt[lane * self.size + slot] = True
        self._halted = set()
        return halt

    def _controls(self, size: int) -> device.Controls:
        rows = size * self._lanes * len(self._group.members)
        return row_controls(self._sampling, rows, self._vocab)

    def _take(self, steps: int, reason: np.ndarray, drawn: device.Drawn) -> None:
        """Takes in what a chunk drew."""
        self.counts.steps += steps
        self.counts.chunks += 1
        self.counts.computed += steps * self._lanes * self.size
        for (lane, slot), row in list(self._rows.items()):
            at = lane * self.size + slot
            count = int(drawn.count[at])
            self.sampled += count
            if row.stop is None:
                row.take(drawn, at, int(reason[at]))
                if row.runs:
                    continue
                self._unread.append(row)
            elif reason[at] == device.RUNNING:
                self._halted.add((lane, slot))
            if reason[at] == device.INVALID:
                self._dirty.add((lane, slot))
            self._slots.end(lane, slot, clean=reason[at] != device.INVALID)
            del self._rows[lane, slot]

    def _read(self, results: dict[int, Result], ended: Callable[[int, Result], None]) -> None:
        """Looks for stop strings in what was drawn, and hands over what has ended."""
        for row in [*self._unread, *(self._rows.values() if self._sampling.stop else ())]:
            if row.stop is not None:
                continue  # it was handed over when this was seen
            row.look(self._tokenizer, self._sampling)
            if row.stop is not None or not row.runs:
                self.ended += 1
                results[row.request.number] = result = row.result(self._tokenizer)
                ended(row.request.number, result)
        self._unread = []

    @property
    def _patience(self) -> int:
        """Slots that must be free before prompts are brought in: a few at once cost little more than one."""
        return max(1, self._lanes * self.size // 16)


def row_controls(sampling: Sampling, rows: int, vocab: int) -> device.Controls:
    """One sampling for all slots. Each has values of its own, so that they may differ later without compiling."""

    def each(value: float, dtype: type) -> Any:
        return np.full(rows, value, dtype)

    stop_ids: Any = np.full((rows, MAX_STOP_IDS), vocab, np.int32)
    stop_ids[:, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
    filters = Filters(
        temperature=each(sampling.temperature, np.float32),
        top_k=each(sampling.top_k, np.int32),
        top_p=each(sampling.top_p, np.float32),
        min_p=each(sampling.min_p, np.float32),
    )
    return device.Controls(filters, each(sampling.min_new_tokens, np.int32), stop_ids)
