"""launch/gpu_mpi.sh under a real mpirun (Debian: openmpi-bin), on this machine's CPU."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.fakes import RUN, Fake, met, times, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="not installed: mpirun (Debian: openmpi-bin)"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux is not installed"),
]


class Run:
    """The script with the stand-in for the run as interpreter, two processes."""

    def __init__(self, fake: Fake, folder: Path) -> None:
        self.fake = fake
        self.workdir = folder / "workdir"
        self.workdir.mkdir()
        self.pids = self.workdir / "pids"
        fake.program(
            "python",
            f'#!/bin/bash\necho $$ >>"{self.pids}"\nexec "{sys.executable}" "{Path(__file__).parent}/meet.py" "$@"\n',
        )

    def start(self, **settings: str) -> subprocess.Popen[str]:
        """Starts it."""
        own = {"PER_HOST": "2", "JAX_NUM_CPU_DEVICES": "2", "LAST_WORDS": "4"}
        return self.fake.start("gpu_mpi.sh", f"--workdir={self.workdir}", **own | settings)

    def left(self) -> list[int]:
        """Processes of the run that are still there."""
        return self.fake.left(5)


@pytest.fixture
def run(fake: Fake, tmp_path: Path) -> Run:
    return Run(fake, tmp_path)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize("coordinator", ["", "127.0.0.1:29871"], ids=["found", "given"])
def test_processes_find_each_other(run: Run, coordinator: str) -> None:
    status, _, err = finish(run.start(COORDINATOR=coordinator))
    assert status == 0, err
    assert met(run.workdir) == times(1)
    assert run.left() == []


def test_two_steps_of_training(fake: Fake, tmp_path: Path) -> None:
    settings = {"PER_HOST": "2", "PYTHON": sys.executable, "JAX_NUM_CPU_DEVICES": "1"}
    status, out, err = finish(fake.start("gpu_mpi.sh", *RUN, f"--workdir={tmp_path}/run", **settings))
    assert status == 0, out + err
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) >= 2
    assert (tmp_path / "run/samples.1.jsonl").exists()


@pytest.mark.parametrize(("word", "status"), [("fail", 3), ("stop", 1)])
def test_a_failed_or_stopped_process_ends_all_and_the_run_is_started_again(run: Run, word: str, status: int) -> None:
    begun = time.monotonic()
    code, _, err = finish(run.start(RESTARTS="1", MEET=f"{word},end"))
    assert code == 0, err
    assert time.monotonic() - begun < 100
    assert met(run.workdir) == times(2)
    assert f"status {status}: restart 1 of 1" in err
    assert run.left() == []


def test_bad_input_is_not_tried_again(run: Run) -> None:
    assert finish(run.start(MEET="bad"))[0] == 2
    assert (run.workdir / "attempts.0").read_text() == "x"


def test_sigterm_saves_and_ends_the_run(run: Run) -> None:
    launcher = run.start(MEET="wait")
    for rank in (0, 1):
        wait_for(run.workdir / f"waits.{rank}", lines=0, patience=60)
    launcher.send_signal(signal.SIGTERM)
    status, _, err = finish(launcher)
    assert status == 75, err
    assert run.left() == []


def test_processes_die_with_the_launcher(run: Run) -> None:
    launcher = run.start(MEET="wait")
    for rank in (0, 1):
        wait_for(run.workdir / f"waits.{rank}", lines=0, patience=60)
    launcher.kill()
    launcher.communicate(timeout=60)
    assert run.left() == []
