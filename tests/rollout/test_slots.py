"""Which request goes where: sharing of prompts, pieces of long ones, lanes, fewer slots."""

from __future__ import annotations

import numpy as np
import pytest

from yatt_jax.rollout.slots import Copy, Request, Slots, pack_counts, sizes


def requests(*lengths: int, keys: list[int] | None = None) -> list[Request]:
    given = range(len(lengths)) if keys is None else keys
    return [Request(i, list(range(n)), key) for i, (n, key) in enumerate(zip(lengths, given, strict=True))]


def started(work) -> list[int]:
    return [request.number for _, _, request in work.starts]


def test_prompts_share_packs_and_keep_their_order() -> None:
    slots = Slots(lanes=1, size=4, pack=8)
    slots.add(requests(5, 4, 1, 6, 3))
    work = slots.plan(admit=True)
    # 4 and 3 tokens fill a pack but for one; 5 do not fit and take another; one token needs nothing computed.
    assert [[(r.number, offset) for r, offset in pack] for pack in work.packs[0]] == [[(0, 0), (1, 4)], [(3, 0)]]
    assert work.from_packs == [Copy(0, 0, 0, 0), Copy(0, 0, 4, 1), Copy(0, 1, 0, 3)]
    assert started(work) == [0, 1, 2, 3]
    assert (slots.free, slots.busiest, len(slots.waiting)) == (0, 4, 1)
    assert started(slots.plan(admit=True)) == []
    slots.end(0, 2)
    assert started(slots.plan(admit=False)) == []
    again = slots.plan(admit=True)
    assert [(slot, r.number) for _, slot, r in again.starts] == [(2, 4)]


def test_samples_of_a_prompt_compute_it_once() -> None:
    slots = Slots(lanes=1, size=3, pack=8)
    slots.add(requests(5, 5, 5, 5, 5, keys=[7] * 5))
    work = slots.plan(admit=True)
    assert [[r.number for r, _ in pack] for pack in work.packs[0]] == [[0]]
    assert work.from_packs == [Copy(0, 0, 0, slot) for slot in range(3)]
    slots.end(0, 1)
    again = slots.plan(admit=True)  # the slot that was left holds the prompt still
    assert (again.packs, again.from_slots, again.from_packs) == ([[]], [], [])
    assert [(slot, r.number) for _, slot, r in again.starts] == [(1, 3)]
    slots.end(0, 0, clean=False)
    dirty = slots.plan(admit=True)  # one that held what is not a number gets a copy of another
    (copy,) = dirty.from_slots
    assert (copy.slot, dirty.packs) == (0, [[]])
    assert copy.source in (1, 2)


def test_a_prompt_is_not_copied_from_a_slot_that_is_being_filled() -> None:
    slots = Slots(lanes=1, size=2, pack=8)
    slots.add(requests(5, 6, keys=[1, 2]))
    slots.plan(admit=True)
    slots.end(0, 0)
    slots.end(0, 1)
    slots.add([Request(2, list(range(7)), 3), Request(3, list(range(5)), 1)])
    work = slots.plan(admit=True)
    # Request 2 may take slot 0, where the prompt of request 3 lay.
    taken = {slot for _, slot, r in work.starts if r.number == 2}
    for copy in work.from_slots:
        assert copy.source not in taken
    assert sorted(started(work)) == [2, 3]


def test_long_prompts_come_in_pieces_and_are_shared_when_complete() -> None:
    slots = Slots(lanes=1, size=3, pack=4)
    slots.add(requests(12, 12, 3, keys=[1, 1, 2]))
    first = slots.plan(admit=True)
    assert [(p.begin, p.end, p.slot) for p in first.pieces] == [(4, 8, 0)]
    assert started(first) == [2]
    assert slots.filling
    second = slots.plan(admit=True)
    assert [(p.begin, p.end) for p in second.pieces] == [(8, 11)]
    assert second.from_pieces == [Copy(0, 0, 0, 1)]
    assert sorted(started(second)) == [0, 1]
    assert not slots.filling
    assert slots.plan(admit=True).pieces == []


def test_lanes_are_filled_evenly_and_share_nothing() -> None:
    slots = Slots(lanes=2, size=2, pack=8)
    slots.add(requests(3, 4, 5, 6))
    work = slots.plan(admit=True)
    assert sorted(lane for lane, _, _ in work.starts) == [0, 0, 1, 1]
    assert slots.busiest == 2
    slots.add(requests(5, 5, keys=[9, 9]))
    for lane, slot, _ in slots.running:
        slots.end(lane, slot)
    work = slots.plan(admit=True)
    assert len({lane for lane, _, _ in work.starts}) == 1  # beside the one that computes the prompt
    assert sum(len(packs) for packs in work.packs) == 1


def test_fewer_slots_keep_what_runs() -> None:
    slots = Slots(lanes=1, size=8, pack=8)
    slots.add(requests(*[3] * 8))
    slots.plan(admit=True)
    for slot in (0, 1, 2, 4, 6, 7):
        slots.end(0, slot)
    (kept,) = slots.shrink(4)
    assert kept[:2] == [3, 5]
    assert len(set(kept)) == 4
    assert [(slot, r.number) for _, slot, r in slots.running] == [(0, 3), (1, 5)]
    assert slots.free == 2
    slots.end(0, 1)
    assert slots.busiest == 1


@pytest.mark.parametrize("seed", range(20))
def test_every_request_runs_once_with_its_own_prompt(seed: int) -> None:
    """Replays plans on slots that hold prompts: what a row starts from is its prompt, whatever was there before."""
    rng = np.random.default_rng(seed)
    lanes, size, pack = rng.integers(1, 4), int(rng.integers(1, 6)), int(rng.integers(2, 9))
    prompts = [rng.integers(0, 9, rng.integers(1, 20)).tolist() for _ in range(6)]
    keys = rng.integers(0, len(prompts), 40).tolist()
    slots = Slots(int(lanes), size, pack)
    slots.add(Request(i, prompts[key], key) for i, key in enumerate(keys))
    held = {(lane, slot): [] for lane in range(lanes) for slot in range(size)}
    seen: list[int] = []
    for _ in range(1000):
        work = slots.plan(admit=bool(rng.integers(2)))
        before = {at: list(tokens) for at, tokens in held.items()}
        for copy in work.from_slots:
            held[copy.lane, copy.slot] = before[copy.lane, copy.source]
        packs = [[[r.tokens[: min(r.cached, pack)] for r, _ in p] for p in of_lane] for of_lane in work.packs]
        offsets = [[[offset for _, offset in p] for p in of_lane] for of_lane in work.packs]
        for of_lane in packs:
            assert all(sum(map(len, p)) <= pack for p in of_lane)
        for copy in work.from_packs:
            which = offsets[copy.lane][copy.source].index(copy.offset)
            held[copy.lane, copy.slot] = list(packs[copy.lane][copy.source][which])
        for piece in work.pieces:
            assert held[piece.lane, piece.slot] == list(piece.request.tokens[: piece.begin])
            held[piece.lane, piece.slot] += piece.request.tokens[piece.begin : piece.end]
        for copy in work.from_pieces:
            held[copy.lane, copy.slot] = list(held[copy.lane, copy.source])
        for lane, slot, request in work.starts:
            assert held[lane, slot][: request.cached] == list(request.tokens[:-1]), (seed, request)
            seen.append(request.number)
        for lane, slot, request in slots.running:
            assert held[lane, slot][: request.cached] == list(request.tokens[:-1])
            if rng.integers(3) == 0:
                clean = bool(rng.integers(2))
                slots.end(lane, slot, clean=clean)
                if not clean:
                    held[lane, slot] = []
        if not (slots.waiting or slots.running or slots.filling):
            break
    assert sorted(seen) == list(range(40))


def test_sizes_that_programs_are_compiled_for() -> None:
    assert [sizes(n) for n in (1, 6, 8, 32, 100)] == [[1], [6], [8, 5, 3, 2], [32, 20, 12, 6, 2], [100, 63, 38, 19, 7]]
    assert [pack_counts(n) for n in (1, 7, 8, 32)] == [[1], [7], [1, 2, 8], [2, 8, 32]]
