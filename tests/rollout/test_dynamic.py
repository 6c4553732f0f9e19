from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from yatt_jax.rollout.dynamic import DynamicSampling, Verdict, explain, judge, observed, wave_size

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
    assert wave_size(ratio, options, wanted=10, have=have, waves=waves) == expected


def test_the_ratio_is_a_capped_moving_average():
    ratio = observed(0.0, ON, drawn=10, with_signal=4)
    assert ratio == pytest.approx(2.5)  # the first wave sets it
    ratio = observed(ratio, ON, drawn=8, with_signal=2)
    assert ratio == pytest.approx(0.9 * 2.5 + 0.1 * 4)
    ratio = observed(ratio, ON, drawn=8, with_signal=0)
    assert ratio == pytest.approx(0.9 * 2.65 + 0.1 * 8)
    assert observed(0.0, ON, drawn=100, with_signal=1) == 8.0
    assert observed(0.0, DynamicSampling(ratio_cap=3.0), drawn=9, with_signal=1) == 3.0
    assert observed(ratio, ON, drawn=0, with_signal=0) == ratio


def test_hopeless_prompts_end_after_bounded_waves():
    ratio, waves, drawn = 0.0, 0, []
    while count := wave_size(ratio, ON, wanted=4, have=0, waves=waves):
        drawn.append(count)
        ratio, waves = observed(ratio, ON, drawn=count, with_signal=0), waves + 1
    assert drawn == [4] + [32] * 9  # at most the cap
    verdicts: list[Verdict] = [*["all_zero"] * 6, *["all_one"] * 3, "all_equal"]  # pyright: ignore[reportAssignmentType]
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
        ({"shortfall": "stop"}, "shortfall = 'stop': expected one of ['pad', 'fill', 'fail']"),
        ({"enabled": 1}, "enabled = 1: expected True or False"),
    ],
)
def test_faults_name_the_key(values: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        DynamicSampling(**values)
    assert message in str(error.value)
