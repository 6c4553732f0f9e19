"""Pipelines from scratch: PPO against a learned reward model does better by the rule, and attributes steer answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


def run(name: str, folder: Path) -> None:
    """Runs a pipeline."""
    words = [sys.executable, "-m", "tools.pipeline", f"configs/pipeline/{name}.py:small", f"--workdir={folder}"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def held_out(folder: Path, name: str) -> list[float]:
    return [line[name] for line in lines(folder / "metrics.jsonl") if name in line]


def test_ppo_against_a_reward_model(tmp_path: Path) -> None:
    run("rlhf", tmp_path)
    assert held_out(tmp_path / "reward_model", "eval/accuracy")[-1] > 0.95
    model, rule = (held_out(tmp_path / "ppo", f"eval/reward/{name}") for name in ("model", "rule"))
    assert model[-1] > model[0] + 0.4, model
    assert rule[-1] > rule[0] + 0.05, rule


def test_answers_are_better_than_the_data_where_that_is_asked_for(tmp_path: Path) -> None:
    run("steerlm", tmp_path)
    given = lines(ROOT / "configs/data/digits_unpaired_train.jsonl")
    asked = [line["messages"] for line in lines(tmp_path / "respond" / "rows.jsonl")]
    right = [answer["content"] == "0123456789"[int(user["content"][-1]) + 1 :] for user, answer in asked]
    assert sum(line["label"] for line in given) / len(given) < 0.5
    assert sum(right) / len(right) > 0.6
