"""The learning gate: the digits task is learned from its reward, and not from rewards of other samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs import ppo_digits
from tests.controller import tiny
from yatt_jax.controller.online import train
from yatt_jax.controller.online_job import OnlineJob
from yatt_jax.parallel.partition import Split

pytestmark = pytest.mark.slow


def held_out(folder: Path, variant: str, seed: int) -> list[float]:
    """Held-out rewards of a run, in order."""
    config: Any = ppo_digits.get_config(variant).unlock()
    config.seed = seed
    config.compilation_cache = ""
    config.parallel.train = {"data": 8, "fsdp": 1, "tensor": 1}
    plan = tiny.plan(config)
    assert plan.train.split == Split(8, 1, 1)
    with OnlineJob(plan, folder / "run") as job:
        train(job)
    lines = (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    return [line["eval/reward"] for line in map(json.loads, lines) if "eval/reward" in line]


@pytest.mark.parametrize("seed", range(5))
def test_it_reaches_90_percent_of_the_best_reward(tmp_path: Path, seed: int) -> None:
    rewards = held_out(tmp_path, "", seed)
    assert rewards[0] < 0.2
    assert max(rewards) >= 0.9, rewards


@pytest.mark.parametrize("seed", range(2))
def test_it_does_not_with_shuffled_rewards(tmp_path: Path, seed: int) -> None:
    assert max(held_out(tmp_path, "shuffled", seed)) < 0.3
