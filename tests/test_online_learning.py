"""Every online algorithm without a critic learns the digits task, in three seeds, and not from other samples' rewards.

Models are from scratch, prompts of the evaluation are held out. The figures are in README.md; PPO's test is
``test_learning``, of more seeds and to the end.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.controller import tiny
from yatt_jax.controller.online import train
from yatt_jax.controller.online_job import OnlineJob

pytestmark = pytest.mark.slow

BY_REWARD = [
    "grpo_digits",
    "dr_grpo_digits",
    "gspo_digits",
    "cispo_digits",
    "dapo_digits",
    "rloo_digits",
    "reinforce_pp_digits",
    "reinforce_pp_digits:baseline",
    "best_of_n_digits",
]
REACHED, BOUND = 0.85, 0.25  # of a best reward of 1, and 0.03 by guessing
TEACHER = 0.5  # the teacher itself gets 0.58


def held_out(folder: Path, name: str, *, seed: int, variant: str = "", **changes: Any) -> list[float]:
    """Held-out rewards of a run on one device, in order."""
    name, _, own = name.partition(":")
    config: Any = importlib.import_module(f"configs.{name}").get_config(variant or own).unlock()
    config.update(seed=seed, compilation_cache="", **changes)
    config.report.export = False
    one = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda: one)
        plan = tiny.plan(config)
    with OnlineJob(plan, folder / "run") as job:
        train(job)
    lines = (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    return [line["eval/reward"] for line in map(json.loads, lines) if "eval/reward" in line]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*BY_REWARD, "distill_digits", "spin_digits"])
def test_it_learns(tmp_path: Path, name: str, seed: int) -> None:
    rewards = held_out(tmp_path, name, seed=seed)
    assert rewards[0] < 0.2
    assert rewards[-1] >= (TEACHER if name == "distill_digits" else REACHED), rewards


@pytest.mark.parametrize("name", [name for name in BY_REWARD if ":" not in name])
def test_it_does_not_from_shuffled_rewards(tmp_path: Path, name: str) -> None:
    assert max(held_out(tmp_path, name, seed=0, variant="shuffled")) < BOUND
