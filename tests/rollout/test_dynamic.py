from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from yatt_jax.rollout.dynamic import (
    DynamicSampling,
    DynamicState,
    Group,
    Verdict,
    begin,
    explain,
    judge,
    observe,
    settle,
    wave_size,
)

ON = DynamicSampling(enabled=True)
NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([1.0, 0.0, 0.0, 1.0], "signal"),
        ([1.0, NAN, 0.0], "signal"),
        ([0.5, 0.5 + 1e-6], "signal"),
        ([0.0, 0.0], "all_zero"),
        ([0.0, NAN, -0.0], "all_zero"),
        ([1.0, 1.0, 1.0], "all_one"),
        ([0.7, 0.7], "all_equal"),
        ([1.0, NAN], "invalid"),
        ([NAN, math.inf], "invalid"),
        ([], "invalid"),
    ],
)
def test_judge(rewards, verdict):
    assert judge(rewards) == verdict
    assert judge(np.array(rewards, np.float32)) == verdict  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("ratio", "oversampling", "have", "waves", "expected"),
    [
        (0.0, 1.0, 0, 0, 10),  # nothing is known yet
        (2.5, 1.0, 0, 0, 25),
        (2.5, 1.0, 7, 1, 8),  # ceil(3 * 2.5)
        (1.2, 1.25, 3, 1, 11),  # ceil(7 * 1.2 * 1.25 = 10.5)
        (0.0, 1.1, 0, 0, 11),  # not 12 by a rounding error of 10 * 1.1
        (3.0, 1.0, 10, 1, 0),
        (3.0, 1.0, 14, 0, 0),
        (3.0, 1.0, 0, 10, 0),  # the waves are used up
        (3.0, 1.0, 9, 9, 3),
    ],
)
def test_wave_size(ratio, oversampling, have, waves, expected):
    options = DynamicSampling(enabled=True, oversampling=oversampling)
    assert wave_size(DynamicState(ratio), options, wanted=10, have=have, waves=waves) == expected


def test_the_ratio_is_a_capped_moving_average():
    state = observe(DynamicState(), ON, drawn=10, with_signal=4)
    assert state.ratio == pytest.approx(2.5)  # the first wave sets it
    state = observe(state, ON, drawn=8, with_signal=2)
    assert state.ratio == pytest.approx(0.9 * 2.5 + 0.1 * 4)
    state = observe(state, ON, drawn=8, with_signal=0)
    assert state.ratio == pytest.approx(0.9 * 2.65 + 0.1 * 8)
    assert observe(DynamicState(), ON, drawn=100, with_signal=1).ratio == 8.0
    assert observe(DynamicState(), DynamicSampling(ratio_cap=3.0), drawn=9, with_signal=1).ratio == 3.0
    assert observe(state, ON, drawn=0, with_signal=0) == state


def test_settle_takes_the_oldest_whatever_the_order():
    pool = [Group(7, 3), Group(2, 2), Group(5, 3), Group(9, 2)]
    for order in (pool, pool[::-1], sorted(pool, key=lambda g: g.number)):
        used, state, missing = settle(DynamicState(2.0), order, wanted=3)
        assert used == [Group(2, 2), Group(9, 2), Group(5, 3)]
        assert state == DynamicState(2.0, (Group(7, 3),))
        assert missing == 0
    used, state, missing = settle(DynamicState(2.0), pool, wanted=6)
    assert (len(used), state.surplus, missing) == (4, (), 2)


def test_surplus_is_kept_while_it_is_fresh():
    state = DynamicState(2.0, (Group(2, 2), Group(7, 3)))
    after, pool = begin(state, ON, 4)
    assert pool == [Group(7, 3)]
    assert after == DynamicState(2.0)
    assert begin(state, DynamicSampling(max_age=2), 4)[1] == [Group(2, 2), Group(7, 3)]
    assert begin(state, DynamicSampling(max_age=0), 4)[1] == []


def test_the_state_survives_a_checkpoint():
    state = DynamicState(0.1 + 0.2, (Group(2**40, 2), Group(7, 3)))
    assert DynamicState.from_json(json.loads(json.dumps(state.to_json()))) == state
    assert DynamicState.from_json(DynamicState().to_json()) == DynamicState()


def test_a_run_of_steps():
    """Prompts whose number divides by 3 have a signal: every step gets its 4 groups, each prompt is used once."""
    state, drawn, used = DynamicState(), 0, []
    waves_of = []
    for step in range(20):
        state, pool = begin(state, ON, step)
        waves = 0
        while count := wave_size(state, ON, wanted=4, have=len(pool), waves=waves):
            numbers = range(drawn, drawn + count)
            drawn, waves = drawn + count, waves + 1
            good = [Group(n, step) for n in numbers if n % 3 == 0]
            state, pool = observe(state, ON, drawn=count, with_signal=len(good)), pool + good
        taken, state, missing = settle(state, pool, wanted=4)
        assert missing == 0
        assert all(step - group.step <= 1 for group in taken)
        used += [group.number for group in taken]
        waves_of.append(waves)
    assert used == [3 * i for i in range(80)]  # none is lost, none comes twice
    assert waves_of[0] > 1
    assert np.mean(waves_of[5:]) < 1.5  # it has learned how many to draw
    assert state.ratio == pytest.approx(3.0, abs=0.4)


def test_hopeless_prompts_end_after_bounded_waves():
    state, pool = begin(DynamicState(), ON, 0)
    waves, drawn = 0, []
    while count := wave_size(state, ON, wanted=4, have=len(pool), waves=waves):
        drawn.append(count)
        state, waves = observe(state, ON, drawn=count, with_signal=0), waves + 1
    assert drawn == [4] + [32] * 9  # at most the cap
    _, _, missing = settle(state, pool, wanted=4)
    assert missing == 4
    verdicts: list[Verdict] = [judge([value, value]) for value in [0.0] * 6 + [1.0] * 3 + [0.5]]
    message = explain(verdicts, wanted=4, have=0, waves=waves)
    assert "0 of 4 groups" in message
    assert "10 waves of 10 prompts" in message
    assert "60 % all 0, 30 % all 1, 10 % all equal otherwise, 0 % without two valid" in message
    assert "rollout.dynamic.max_waves" in message
    assert "0 % all 0" in explain([], wanted=4, have=0, waves=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_waves": 0}, "max_waves = 0: must be at least 1"),
        ({"oversampling": 0.5}, "oversampling = 0.5: must be at least 1"),
        ({"ratio_cap": 0.0}, "ratio_cap = 0.0"),
        ({"max_age": -1}, "max_age = -1"),
        ({"shortfall": "stop"}, "shortfall = 'stop': expected one of ['pad', 'fill', 'fail']"),
        ({"enabled": 1}, "enabled = 1: expected True or False"),
    ],
)
def test_faults_name_the_key(values: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        DynamicSampling(**values)
    assert message in str(error.value)
