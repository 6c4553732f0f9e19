"""Offline jobs of several processes: the same run for any number of them, also when the number changes in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.controller.offline_tiny import STEADY
from tests.processes import run_processes

pytestmark = pytest.mark.slow

PROGRAM = ["tests/controller/offline_process.py"]
CHANGES: dict[str, Any] = STEADY | {"data__batch": 10, "train__micro_rows": 2, "report__export": False}


def run(folder: Path, name: str, processes: int, devices: int, **changes: Any) -> tuple[list[np.ndarray], list[Any]]:
    """Runs the job; returns the final parameters, and of each step the figures that nothing may change."""
    folder.mkdir(exist_ok=True)
    spec = {"name": name, "folder": str(folder), "changes": CHANGES | changes}
    run_processes(PROGRAM, processes, devices, timeout=300, env={"YATT_TEST_JOB": json.dumps(spec)})
    with np.load(folder / "params.npz") as saved:
        params = [saved[name] for name in saved.files]
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    kept = ("eval/", "data/epoch", "data/rows", "data/skipped")
    # At the start chosen and rejected are alike, and which one leads is rounding.
    return params, [
        [(key, line[key]) for key in sorted(line) if key.startswith(kept) and ("accuracy" not in key or line["step"])]
        for line in lines
    ]


def check_same(one: tuple[list[np.ndarray], list[Any]], other: tuple[list[np.ndarray], list[Any]]) -> None:
    for a, b in zip(one[0], other[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    for line, again in zip(one[1], other[1], strict=True):
        assert [name for name, _ in line] == [name for name, _ in again]
        np.testing.assert_allclose([v for _, v in line], [v for _, v in again], rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward_model", "distill_teacher"])
def test_the_same_run_for_several_processes(tmp_path: Path, name: str) -> None:
    alone = run(tmp_path / "alone", name, 1, 1)
    check_same(alone, run(tmp_path / "two", name, 2, 4, parallel__train__fsdp=2, parallel__train__tensor=2))
    check_same(alone, run(tmp_path / "three", name, 3, 1))


@pytest.mark.parametrize("name", ["sft", "kto"])
def test_one_two_and_four_processes_in_turn(tmp_path: Path, name: str) -> None:
    alone = run(tmp_path / "alone", name, 1, 1, steps=4, evaluation__every=1)
    for steps, processes in ((1, 1), (2, 2), (3, 4), (4, 1)):
        found = run(tmp_path / "turns", name, processes, 1, steps=steps, evaluation__every=1)
    check_same(alone, found)
