"""When to save, what to keep, when to stop: by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest

from yatt_jax.io.checkpoint_config import CheckpointConfig, EarlyStop, Saved, is_due, superseded


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep": -1}, "keep = -1: must be at least 0"),
        ({"every_minutes": -0.5}, "every_minutes = -0.5"),
        ({"best_mode": "most"}, "best_mode = 'most': expected one of ['max', 'min']"),
        ({"on_failure": "ignore"}, "on_failure = 'ignore'"),
        ({"keep_best": 1}, "best_metric is empty"),
        ({"early_stop_patience": 3}, "best_metric is empty"),
        ({"best_metric": "eval/reward"}, "set keep_best or early_stop_patience"),
        ({"best_metric": "eval/reward", "keep_best": 1, "keep": 0}, "with keep = 0 nothing is saved"),
    ],
)
def test_faults(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        CheckpointConfig(**values)


def due(config: CheckpointConfig, step: int, *saved: Saved, **facts: Any) -> bool:
    return is_due(config, step, saved, **({"minutes": 0.0, "metric": None, "last": False} | facts))


def test_due() -> None:
    by_steps = CheckpointConfig(every_steps=5)
    assert [step for step in range(12) if due(by_steps, step)] == [5, 10]
    assert due(by_steps, 7, last=True)
    assert due(by_steps, 0, last=True)  # told to stop before the first step
    assert not due(by_steps, 5, Saved(5))
    assert not due(by_steps, 7, Saved(7), last=True)
    by_time = CheckpointConfig(every_steps=0, every_minutes=2.5)
    assert [minutes for minutes in (0.0, 2.4, 2.5, 9.0) if due(by_time, 3, minutes=minutes)] == [2.5, 9.0]
    neither = CheckpointConfig(every_steps=0)
    assert not due(neither, 100, minutes=1e9, metric=1.0)
    assert due(neither, 100, last=True)
    assert not due(CheckpointConfig(keep=0), 100, last=True)


def test_due_for_a_new_best() -> None:
    config = CheckpointConfig(every_steps=0, best_metric="eval/reward", keep_best=2)
    assert due(config, 4, metric=-3.0)
    assert not due(config, 4, metric=math.nan)
    assert not due(config, 4)
    saved = (Saved(1, 0.5), Saved(2, 0.7), Saved(3))
    assert due(config, 4, *saved, metric=0.6)
    assert not due(config, 4, *saved, metric=0.5)  # of equal ones the earlier stays
    least = dataclasses.replace(config, best_mode="min")
    assert due(least, 4, *saved, metric=0.4)
    assert not due(least, 4, *saved, metric=0.8)


def test_superseded() -> None:
    saved = [Saved(30, 0.2), Saved(10, 0.9), Saved(20, math.nan), Saved(40), Saved(50, 0.9)]
    assert superseded(CheckpointConfig(keep=2), saved) == [10, 20, 30]
    best = CheckpointConfig(keep=1, best_metric="m", keep_best=1)
    assert superseded(best, saved) == [20, 30, 40]
    assert superseded(dataclasses.replace(best, best_mode="min"), saved) == [10, 20, 40]
    assert superseded(dataclasses.replace(best, keep_best=3), saved) == [20, 40]
    assert superseded(CheckpointConfig(keep=9), saved) == []


def test_early_stop() -> None:
    config = CheckpointConfig(best_metric="m", early_stop_patience=2)
    state, seen = EarlyStop(), []
    for value in (0.1, 0.3, 0.2, 0.4, math.nan, 0.4):
        state = state.after(value, config)
        state = EarlyStop(**json.loads(json.dumps(dataclasses.asdict(state))))
        seen.append((state.best, state.since, state.reached(config)))
    assert seen == [
        (0.1, 0, False),
        (0.3, 0, False),
        (0.3, 1, False),
        (0.4, 0, False),
        (0.4, 1, False),
        (0.4, 2, True),
    ]
    least = dataclasses.replace(config, best_mode="min")
    assert EarlyStop().after(2.0, least).after(1.0, least) == EarlyStop(1.0, 0)
    assert EarlyStop().after(math.nan, least) == EarlyStop(None, 1)
    never = CheckpointConfig(best_metric="m", keep_best=1)
    assert not EarlyStop(0.0, 1000).reached(never)
