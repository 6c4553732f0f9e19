"""The benchmark of checkpoints: its figures fit together, and it leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench_checkpoint import main


def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk, figures = tmp_path / "disk", tmp_path / "figures.json"
    disk.mkdir()
    assert main(["--folder", str(disk), "--gb", "0.002", "--arrays", "2", "--runs", "1", "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert found["gb"] == 2 * 8 * 8 * 4096 * 4 / 1e9  # rows are rounded to the eight devices
    assert found["save_gb_per_second"] == pytest.approx(found["gb"] / found["save_seconds"])
    assert 0 < found["pause_seconds"] < found["save_seconds"]
    assert "restoring" in capsys.readouterr().out
    assert list(disk.iterdir()) == []
    assert main(["--folder", str(tmp_path / "none")]) == 2
    assert "error: " in capsys.readouterr().err
