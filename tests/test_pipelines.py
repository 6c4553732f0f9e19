"""Pipelines from scratch: PPO against a learned reward model does better by the rule, and attributes steer answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


def call(*words: str) -> str:
    """Runs a tool; what it says."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def held_out(folder: Path, name: str) -> list[float]:
    metrics: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in metrics if name in line]


@pytest.mark.parametrize("seed", range(3))
def test_ppo_against_a_reward_model(tmp_path: Path, seed: int) -> None:
    seeds = [f"--set={stage}.seed={seed}" for stage in ("sft", "reward_model", "ppo")]
    call("tools.pipeline", "configs/pipeline/rlhf.py:small", f"--workdir={tmp_path}", *seeds)
    assert held_out(tmp_path / "reward_model", "eval/accuracy")[-1] > 0.95
    model, rule = (held_out(tmp_path / "ppo", f"eval/reward/{name}") for name in ("model", "rule"))
    assert model[-1] > model[0]
    assert rule[-1] > rule[0] + 0.1, rule


def test_attributes_steer(tmp_path: Path) -> None:
    call("tools.pipeline", "configs/pipeline/steerlm.py:small", f"--workdir={tmp_path}")
    rated = {}
    for wanted in (4, 0):
        out = tmp_path / f"{wanted}.jsonl"
        words = ["--data=configs/data/digits_eval.jsonl", f"--attributes=correctness:{wanted}", "--max_new_tokens=16"]
        call("tools.respond", f"{tmp_path}/bootstrap", *words, f"--out={out}")
        said = call(
            "tools.annotate",
            f"{tmp_path}/attributes",
            f"--data={out}",
            f"--out={out}.rated",
            "--attributes=correctness",
        )
        (mean,) = re.findall(r"correctness ([\d.]+)", said)
        rated[wanted] = float(mean)
    assert rated[4] > rated[0] + 1, rated
