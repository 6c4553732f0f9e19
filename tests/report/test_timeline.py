"""The timeline: nested phases, errors, threads."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from yatt_jax.report import facts
from yatt_jax.report.read import read_run
from yatt_jax.report.rundir import RunDir, RunDirError
from yatt_jax.report.timeline import Timeline


def records(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.file("timeline").read_text().splitlines()]


def test_phases_are_written_and_their_seconds_added_up(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path, 1, 2)
    timeline = Timeline(run)
    timeline.begin(5)
    before = time.time()
    for _ in range(2):
        with timeline.phase("rollout"), timeline.phase("decode"):
            time.sleep(0.02)
    found = records(run)
    assert run.file("timeline").name == "timeline.1.jsonl"
    assert [(r["phase"], r["event"]) for r in found[:4]] == [
        ("rollout", "start"),
        ("rollout/decode", "start"),
        ("rollout/decode", "end"),
        ("rollout", "end"),
    ]
    assert all(r["step"] == 5 and r["process"] == 1 for r in found)
    times = [r["time"] for r in found]
    assert times == sorted(times)
    assert abs(times[0] - before) < 1
    assert found[3]["seconds"] == pytest.approx(found[3]["time"] - found[0]["time"], abs=1e-4)
    seconds = timeline.seconds()
    assert set(seconds) == {"time/rollout", "time/rollout/decode", "time/step"}
    assert 0.04 <= seconds["time/rollout/decode"] <= seconds["time/rollout"] <= seconds["time/step"] < 1
    timeline.begin(6)
    assert set(timeline.seconds()) == {"time/step"}


def test_an_exception_closes_its_phases_and_goes_on(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    timeline = Timeline(run)
    with pytest.raises(ZeroDivisionError), timeline.phase("train"), timeline.phase("critic"):
        _ = 1 / 0
    assert [(r["phase"], r["event"]) for r in records(run)] == [
        ("train", "start"),
        ("train/critic", "start"),
        ("train/critic", "error"),
        ("train", "error"),
    ]
    with timeline.phase("next"):
        pass
    assert records(run)[-1]["phase"] == "next"


def test_a_full_disk_does_not_hide_the_error_of_the_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.open(tmp_path)
    timeline = Timeline(run)

    def full(*args: object) -> None:
        raise RunDirError("the disk is full")

    def fail() -> None:
        with timeline.phase("train"):
            monkeypatch.setattr(run, "append", full)
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(RunDirError, match="disk is full"), timeline.phase("next"):
        pytest.fail("a phase that cannot be written does not start")


def test_threads_nest_on_their_own(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    timeline = Timeline(run)

    def score() -> None:
        with timeline.phase("reward"):
            pass

    with timeline.phase("rollout"):
        thread = threading.Thread(target=score)
        thread.start()
        thread.join()
    assert [r["phase"] for r in records(run)] == ["rollout", "reward", "reward", "rollout"]


def test_a_process_introduces_itself(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path, 1, 2)
    timeline = Timeline(run, 7)
    timeline.introduce(**facts.here())
    with timeline.phase("load"):
        pass
    (about, *_) = records(run)
    assert about["time"] == pytest.approx(time.time(), abs=5)
    assert {k: v for k, v in about.items() if k not in ("time", "host", "versions")} == {
        "step": 7,
        "process": 1,
        "phase": None,
        "event": "process",
        "processes": 2,
        "devices": [f"cpu {i}" for i in range(8)],
    }
    found = read_run(tmp_path)
    assert found.places[1].host == socket.gethostname()
    assert found.places[1].versions["jax"] == jax.__version__
    assert [phase.name for phase in found.phases] == ["load"]
    run.cut_back(6)
    assert records(run) == []
