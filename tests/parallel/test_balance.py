from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from yatt_jax.parallel.balance import Assignment, balance, row_costs
from yatt_jax.parallel.memory import DecoderShape

SMALL = DecoderShape(
    layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, mlp=3, vocab=5, itemsize=4, remat=True
)  # 34 weights in its layer, 10 in its output
LARGE = DecoderShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256, itemsize=2, remat=True
)


def log_normal(rows: int, seed: int) -> np.ndarray:
    lengths = np.exp(np.random.default_rng(seed).normal(np.log(512), 1.0, rows))
    return row_costs(np.maximum(1, lengths).astype(np.int64), LARGE)


def loads(assigned: Assignment, costs: np.ndarray) -> np.ndarray:
    return np.bincount(assigned.shard, costs, assigned.shards)


def check(assigned: Assignment, costs: np.ndarray) -> None:
    """Every row has a place of its own, and the reported spread is the true one."""
    places = assigned.shard.astype(int) * assigned.capacity + assigned.slot
    assert len(set(places.tolist())) == len(costs)
    assert np.all((assigned.slot >= 0) & (assigned.slot < assigned.capacity))
    assert np.all((assigned.shard >= 0) & (assigned.shard < assigned.shards))
    found = loads(assigned, costs)
    assert assigned.after == pytest.approx(found.max() / found.mean(), abs=1e-6)


def test_costs_of_rows_by_hand() -> None:
    # 3 tokens: 2 * 44 * 3 for the matrices, 2 * 1 * 2 * 3 * 4 for six pairs of tokens in one head of two.
    np.testing.assert_array_equal(row_costs(np.array([0, 1, 3]), SMALL), [0.0, 88 + 8, 264 + 48])


def test_long_rows_cost_more_than_their_share() -> None:
    short, long = row_costs(np.array([512, 32 * 512]), LARGE)
    assert 33 < long / short < 64


def test_an_even_split_by_hand() -> None:
    assigned = balance(np.array([8.0, 7, 6, 5, 4, 3, 2, 1]), 2, 4, tolerance=0.0)
    check(assigned, np.arange(8.0, 0, -1))
    assert assigned.after == 1.0
    assert assigned.before == pytest.approx(26 / 18)
    assert assigned.shard[0] == 0
    assert assigned.source()[0] == 0  # the dearest row first


def test_source_names_the_row_of_each_slot() -> None:
    assigned = balance(np.array([3.0, 1.0, 2.0]), 2, 2)
    assert assigned.source().tolist() == [0, -1, 2, 1]
    assert assigned.source(np.array([7, 8, 9])).tolist() == [7, -1, 9, 8]


@pytest.mark.parametrize("rows_each", [16, 32, 128])
@pytest.mark.parametrize("seed", range(3))
def test_log_normal_lengths_are_even_over_64_shards(rows_each: int, seed: int) -> None:
    costs = log_normal(64 * rows_each, seed)
    home = np.arange(len(costs)) // rows_each
    # Where all slots are full, the dearest row has at least the cheapest rows for company.
    forced = costs.max() + np.sort(costs)[: rows_each - 1].sum()
    limit = max(1.05, 1.03 * forced / (costs.sum() / 64))
    for where in (None, home):
        assigned = balance(costs, 64, rows_each, where)
        check(assigned, costs)
        assert assigned.after < limit
        assert assigned.before > 1.2
    assert assigned.moved < 0.25 * len(costs)


def test_with_room_to_spare_few_rows_move() -> None:
    costs = log_normal(64 * 32, 5)
    assigned = balance(costs, 64, 40, np.arange(len(costs)) // 32)
    check(assigned, costs)
    assert assigned.after < 1.05
    assert assigned.moved < 0.05 * len(costs)


def test_rows_of_one_home_spread_over_all() -> None:
    costs = log_normal(256, 1)
    assigned = balance(costs, 8, 40, np.zeros(256, int))
    check(assigned, costs)
    assert assigned.before == 8.0
    assert assigned.after < 1.03
    assert np.bincount(assigned.shard, minlength=8).max() <= 40


def test_even_rows_stay_at_home_and_uneven_ones_within_the_tolerance() -> None:
    home = np.array([3, 3, 1, 1, 0, 0, 2, 2])
    assigned = balance(np.full(8, 5.0), 4, 2, home)
    assert assigned.moved == 0
    np.testing.assert_array_equal(assigned.shard, home)
    costs = np.array([5.0, 5, 5, 5, 5, 5, 5, 5.5])
    assert balance(costs, 4, 3, home, tolerance=0.05).moved == 0
    assert balance(np.array([9.0, 9, 1, 1, 5, 5, 5, 5]), 4, 2, home).moved == 2


@pytest.mark.parametrize("seed", range(12))
def test_small_cases_come_near_the_best_assignment(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs, shards, capacity = rng.integers(1, 100, 7).astype(float), 3, int(rng.integers(3, 6))
    best = np.inf
    for chosen in itertools.product(range(shards), repeat=len(costs)):
        if np.bincount(chosen, minlength=shards).max() <= capacity:
            best = min(best, np.bincount(chosen, costs).max() * shards / costs.sum())
    for home in (None, rng.integers(0, shards, len(costs))):
        assigned = balance(costs, shards, capacity, home, tolerance=0.0)
        check(assigned, costs)
        assert best - 1e-9 <= assigned.after <= 1.1 * best


def test_the_same_for_every_process_and_unit_of_cost() -> None:
    costs, home = log_normal(1000, 3), np.random.default_rng(0).integers(0, 8, 1000)
    one = balance(costs, 8, 200, home)
    for other in (balance(costs.copy(), 8, 200, home.copy()), balance(costs * 2.0**20, 8, 200, home)):
        np.testing.assert_array_equal(one.shard, other.shard)
        np.testing.assert_array_equal(one.slot, other.slot)


def test_edges_of_what_is_possible() -> None:
    assert balance(np.zeros(0), 4, 0).source().tolist() == []
    assert balance(np.zeros(0), 4, 2).source().tolist() == [-1] * 8
    free = balance(np.zeros(3), 2, 2)
    assert sorted(free.source().tolist()) == [-1, 0, 1, 2]
    assert free.after == 1.0
    single = balance(np.array([5.0]), 4, 1)
    assert single.after == 4.0
    assert np.count_nonzero(single.source() >= 0) == 1


@pytest.mark.parametrize("shards", [64, 2048])
def test_many_rows_take_little_time(shards: int) -> None:
    costs = log_normal(16384, 0)
    home = np.arange(16384) // (16384 // shards)
    for where in (None, home):
        begin = time.process_time()
        assigned = balance(costs, shards, 16384 // shards, where)
        assert time.process_time() - begin < 1.0
        check(assigned, costs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.ones(5), 2, 2), "5 rows do not fit in 2 shards of 2"),
        ((np.array([1.0, -1.0]), 2, 2), "finite number >= 0"),
        ((np.array([1.0, np.nan]), 2, 2), "finite number >= 0"),
        ((np.ones(2), 2, 2, np.array([0, 2])), r"a shard 0 \.\.\. 1"),
        ((np.ones(2), 2, 2, np.array([0])), r"a shard 0 \.\.\. 1 for each of 2 rows"),
    ],
)
def test_what_cannot_be_is_named(arguments: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        balance(*arguments)
