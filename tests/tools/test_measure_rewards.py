"""Moments of rewards, from the samples of a run."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from tools.measure_rewards import main


def write(folder: Path) -> None:
    rows = [
        {"step": step, "split": split, "rewards": {"a": value + step, "same": 1.0, "bad": float("nan")}}
        for step in (0, 5)
        for split in ("eval", "train")
        for value in (1.0, 2.0, 6.0)
    ]
    lines = [json.dumps(row) for row in rows]
    (folder / "samples.jsonl").write_text("\n".join(lines[::2]) + "\n")
    (folder / "samples.1.jsonl").write_text("\n".join(lines[1::2]) + "\n")


def test_the_policy_that_a_run_began_with(tmp_path, capsys):
    write(tmp_path)
    assert main([str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "config.rewards.a.mean = 3",
        f"config.rewards.a.std = {statistics.pstdev([1, 2, 6]):.6g}  # 3 eval samples of step 0",
        "config.rewards.same.mean = 1",
        "# same is the same for all 3 samples: there is no deviation to divide by",
    ]
    assert main([str(tmp_path), "--step=5", "--split=train"]) == 0
    assert "config.rewards.a.mean = 8" in capsys.readouterr().out


def test_what_cannot_be_measured(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no samples.jsonl" in capsys.readouterr().err
    write(tmp_path)
    assert main([str(tmp_path), "--step=3"]) == 2
    assert "no eval samples of step 3; there are those of [0, 5]" in capsys.readouterr().err
    (tmp_path / "samples.jsonl").write_text('{"step"\n')
    assert main([str(tmp_path)]) == 2
    assert "samples.jsonl:1: damaged" in capsys.readouterr().err
