"""Estimates from several responses, by counting all choices of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from yatt_jax.ops.estimates import attempts, majority, pass_at, win_share


def test_hand_worked_values():
    assert [pass_at(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert pass_at(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert [pass_at(5, c, 3) for c in (0, 3, 5)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_right_one(n):
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        marks = [1] * right + [0] * (n - right)
        choices = list(itertools.combinations(marks, k))
        assert pass_at(n, right, k) == pytest.approx(sum(map(max, choices)) / len(choices))


@pytest.mark.parametrize("wrong", [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_of_too_few(wrong):
    with pytest.raises(ValueError, match="pass@"):
        pass_at(*wrong)


def test_majority():
    assert majority(["a", "b", "a"], [1, 0, 1]) == 1
    assert majority(["a", "b", "b"], [1, 0, 0]) == 0
    assert majority(["a", "b", "a", "b", "c"], [1, 0, 1, 0, 0]) == 0.5  # a tie: the mean of those in it
    assert majority([None, None, "a"], [0, 0, 1]) == 1
    assert majority([None, None], [0, 0]) == majority([], []) == 0


def test_win_share():
    own, other = np.array([1.0, 2.0]), np.array([1.0, 0.0, 3.0])
    assert win_share(own, other) == pytest.approx((0.5 + 1 + 0 + 1 + 1 + 0) / 6)
    assert win_share(other, own) == pytest.approx(1 - win_share(own, other))
    assert win_share(own, own) == 0.5
    assert win_share(np.array([np.nan, 2.0]), other) == pytest.approx(2 / 3)
    assert math.isnan(win_share(np.array([np.nan]), other))


def test_which_attempts_are_reported():
    assert [attempts(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
