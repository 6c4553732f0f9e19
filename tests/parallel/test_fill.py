from __future__ import annotations

import time

import numpy as np
import pytest

from tests.parallel.test_balance import LARGE
from yatt_jax.parallel.balance import balance, row_costs
from yatt_jax.parallel.fill import UNUSED, Filling, MicroShape, PackShape, fill, pack_shape, rounded


def alone(lengths: list[int], shape: PackShape, capacity: int | None = None) -> Filling:
    """One shard with its rows in the slots 0, 1, ..."""
    n = np.array(lengths)
    return fill(n, n.astype(float), np.zeros(len(n), int), np.arange(len(n)), 1, capacity or len(n), shape)


def test_packs_by_hand() -> None:
    # 7 and 1, 5 and 3, 4 and 2 fill up packs of 8; row 3 has no tokens and is in none.
    shape = PackShape(MicroShape(packs=2, length=8))
    found = alone([4, 1, 7, 0, 5, 2, 3], shape, capacity=8)
    assert (found.large, found.small) == (2, 0)
    assert (found.tokens, found.held) == (22, 32)
    assert found.padding == 10 / 32
    # Longest first, each to the cheapest pack: 7 | 5 | 4 | 3, then 2 with the 3 and 1 with the 4. Packs are dealt by
    # cost: the micro-batches are (7, 5) and (5, 5), and each has its dearest pack first.
    pack, within = np.divmod(found.start[0], 8)
    rows = [(int(slot), int(p), int(w)) for slot, p, w in zip(found.order[0], pack, within, strict=True) if p < 4]
    lengths = [4, 1, 7, 0, 5, 2, 3]
    assert sorted(slot for slot, _, _ in rows) == [0, 1, 2, 4, 5, 6]
    inside = [sum(lengths[slot] for slot, p, _ in rows if p == number) for number in range(4)]
    assert inside == [7, 5, 5, 5]
    assert (2, 0, 0) in rows
    assert found.start[0, -2:].tolist() == [UNUSED] * 2
    assert found.order[0, -2:].tolist() == [3, 7]
    assert found.spread == 1.0


def test_what_is_left_over_goes_to_small_micro_batches() -> None:
    shape = PackShape(MicroShape(4, 8), MicroShape(1, 8))
    assert [shape.least(tokens) for tokens in (0, 1, 8, 9, 24, 25, 32, 33, 90)] == [
        (0, 0), (0, 1), (0, 1), (0, 2), (0, 3), (1, 0), (1, 0), (1, 1), (3, 0),
    ]  # fmt: skip
    assert shape.held(2, 3) == 88
    found = alone([8] * 5, shape)
    assert (found.large, found.small, found.padding) == (1, 1, 0.0)
    # A row too long for the small packs must have a large one.
    short = PackShape(MicroShape(1, 32), MicroShape(1, 8))
    assert (alone([7, 6], short).large, alone([7, 6], short).small) == (0, 2)
    assert (alone([9], short).large, alone([9], short).small) == (1, 0)


def test_the_cheapest_pack_failing_the_fullest_is_tried() -> None:
    # By cost: 6 | 5, then 4 with the 5, 3 with the 6, and 2 finds 1 + 1. By best fit: 6 4 | 5 3 2.
    found = alone([6, 5, 4, 3, 2], PackShape(MicroShape(2, 10)))
    assert (found.large, found.padding) == (1, 0.0)


def test_no_pack_has_more_rows_than_the_loss_has_room_for() -> None:
    shape = PackShape(MicroShape(1, 64))
    assert shape.large.rows_each == 8
    for rows, packs in ((24, 3), (25, 4)):
        found = alone([1] * rows, shape)
        assert found.large == packs
        assert np.bincount(found.start[0][found.start[0] < UNUSED] // 64).max() <= 8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rows_each", [64, 128, 256])
def test_log_normal_lengths_leave_little_padding_over_64_shards(rows_each: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(np.log(512), 1.0, 64 * rows_each)), 1, 8192).astype(int)
    costs, capacity = row_costs(lengths, LARGE), rows_each * 5 // 4
    assigned = balance(costs, 64, capacity, np.arange(len(costs)) // rows_each)
    shape = pack_shape(8192, 8192, capacity)
    begin = time.process_time()
    found = fill(lengths, costs, assigned.shard, assigned.slot, 64, capacity, shape)
    assert time.process_time() - begin < 1.0
    assert assigned.after < 1.05
    assert found.padding < 0.05
    assert found.spread < 1.05  # even where shards wait for each other after every micro-batch
    check(found, lengths, assigned.shard, assigned.slot, shape)


def check(found: Filling, lengths: np.ndarray, shard: np.ndarray, slot: np.ndarray, shape: PackShape) -> None:
    """Every row has room of its own inside one pack."""
    held = shape.held(found.large, found.small)
    edges = np.concatenate(
        [np.arange(found.large * shape.large.packs) * shape.large.length]
        + ([shape.held(found.large, 0) + np.arange(found.small * shape.small.packs) * shape.small.length]
           if shape.small else [])
        + [np.array([held])]
    )  # fmt: skip
    of_slot = np.zeros(found.order.shape, int)
    of_slot[shard, slot] = lengths
    for order, start, sizes in zip(found.order, found.start, of_slot, strict=True):
        n = sizes[order]
        used = start < UNUSED
        assert sorted(order.tolist()) == list(range(len(order)))
        np.testing.assert_array_equal(used, n > 0)
        begin, end = start[used], start[used] + n[used]
        assert np.all(end[:-1] <= begin[1:])
        pack = np.searchsorted(edges, begin, side="right") - 1
        assert np.all(end <= edges[pack + 1])


def test_uneven_shards_have_the_same_number_of_micro_batches() -> None:
    lengths, shard, slot = np.array([8, 8, 8, 1]), np.array([0, 0, 0, 1]), np.array([0, 1, 2, 0])
    shape = PackShape(MicroShape(1, 8))
    found = fill(lengths, lengths.astype(float), shard, slot, 2, 3, shape)
    assert (found.large, found.padding) == (3, 1 - 25 / 48)
    assert found.spread == 24 / 12.5
    check(found, lengths, shard, slot, shape)


def test_edges() -> None:
    nothing = alone([0, 0], PackShape(MicroShape(1, 8)))
    assert (nothing.large, nothing.small, nothing.padding, nothing.spread) == (0, 0, 0.0, 1.0)
    with pytest.raises(ValueError, match="a row of 9 tokens does not fit into packs of 8"):
        alone([9], PackShape(MicroShape(1, 8)))


def test_sizes_of_packs_and_micro_batches() -> None:
    assert [rounded(n) for n in (1, 8, 9, 104, 127, 129, 300, 1000, 8192, 8193)] == [
        8, 8, 16, 104, 128, 136, 304, 1024, 8192, 8320,
    ]  # fmt: skip
    assert pack_shape(64, 16, 100) == PackShape(MicroShape(4, 16))  # too little work for two kinds
    assert pack_shape(8192, 512, 100) == PackShape(MicroShape(16, 512), MicroShape(4, 512))
    assert pack_shape(8192, 512, 3) == PackShape(MicroShape(3, 512), MicroShape(3, 128))
    assert pack_shape(8192, 8192, 3) == PackShape(MicroShape(1, 8192), MicroShape(1, 2048))
