"""launch/local.sh with the real command: training, a stopped process, and stopping early."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launch.fakes import RUN, Fake, left, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux is not installed"),
]


def children(pid: int) -> dict[int, int]:
    """Processes of the run that a launcher started: number of the process -> pid."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        number = re.search(rb"--process=(\d+)", Path(f"/proc/{child}/cmdline").read_bytes())
        if number:
            found[int(number[1])] = int(child)
    return found


@pytest.mark.parametrize("processes", [2, 4])
def test_two_steps_of_training(fake: Fake, tmp_path: Path, processes: int) -> None:
    workdir = tmp_path / "run"
    launcher = fake.start("local.sh", str(processes), *RUN, f"--workdir={workdir}", PYTHON=sys.executable)
    out, err = launcher.communicate(timeout=280)
    assert launcher.returncode == 0, out + err
    assert [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()][-1] == 2
    assert len(list(workdir.glob("samples*.jsonl"))) == processes
    assert len(list(workdir.glob("timeline*.jsonl"))) == processes


def test_a_stopped_process_is_named_by_the_others_and_killed(fake: Fake, tmp_path: Path) -> None:
    more = ("--config.steps=100000", "--config.controller.timeout_s=10", f"--workdir={tmp_path}/run")
    launcher = fake.start("local.sh", "3", *RUN, *more, PYTHON=sys.executable, GRACE="12")
    wait_for(tmp_path / "run/metrics.jsonl", lines=2, patience=200)
    pids = children(launcher.pid)
    assert sorted(pids) == [0, 1, 2]
    os.kill(pids[1], signal.SIGSTOP)
    begun = time.monotonic()
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 1, err
    assert time.monotonic() - begun < 10 + 12 + 5
    for said in (r"^stopped: process 1 \(host .+\) was lost", r"^\[2\] stopped: process 1 \(host .+\) was lost"):
        assert re.search(said, err, re.MULTILINE), err
    assert "process 1 was killed by signal 9" in err
    assert left(list(pids.values())) == []


def test_sigterm_saves_and_the_same_command_goes_on(fake: Fake, tmp_path: Path) -> None:
    command = ("2", *RUN, "--config.steps=40", f"--workdir={tmp_path}/run")
    launcher = fake.start("local.sh", *command, PYTHON=sys.executable)
    wait_for(tmp_path / "run/metrics.jsonl", lines=2, patience=200)
    launcher.send_signal(signal.SIGTERM)
    out, err = launcher.communicate(timeout=100)
    assert launcher.returncode == 75, out + err
    launcher = fake.start("local.sh", *command, PYTHON=sys.executable)
    out, err = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, out + err
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
    assert steps[-1] == 40
