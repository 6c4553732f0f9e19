"""Names of metrics as people read them."""

from __future__ import annotations

from yatt_jax.report.text import find


def test_a_time_is_no_reward():
    names = ["time/evaluate/reward", "eval/reward", "rollout/reward"]
    assert find(names, ["reward"]) == "rollout/reward"
    assert find(names[:2], ["reward"]) is None
