"""Stand-ins for the programs that the launchers start, and what is left of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LAUNCH = ROOT / "launch"

# A run of the real command that is short, less its --workdir.
RUN = (
    "--config=configs/ppo_digits.py:tiny",
    "--config.steps=2",
    "--config.rollout.prompts=8",
    "--config.evaluation.every=0",
    "--config.report.export=False",
    f"--config.compilation_cache={ROOT}/.cache/jax",
)

# Stands for ``python -m yatt_jax.main``. Process I runs the shell text in FAKE_I, or FAKE; $attempt counts its starts.
# What --process does not say, a launcher's environment does.
PYTHON = r"""#!/bin/bash
[[ $2 == pip ]] && exit
process=${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:-${FAKE_PROCESS:-0}}}
for argument in "$@"; do
  case $argument in --process=*) process=${argument#*=} ;; esac
done
echo $$ >>"$FAKE_LOG/pids"
echo x >>"$FAKE_LOG/starts.$process"
attempt=$(wc -l <"$FAKE_LOG/starts.$process")
printf '%s\n' "$@" >"$FAKE_LOG/arguments.$process.$attempt"
env >"$FAKE_LOG/environment.$process.$attempt"
text=FAKE_$process
eval "${!text:-${FAKE:-exit 0}}"
"""


class Fake:
    """A folder with stand-ins on the PATH, and what they wrote down."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.bin = folder / "bin"
        self.log.mkdir()
        self.bin.mkdir()
        self.python = self.program("python", PYTHON)
        self.launchers: list[subprocess.Popen[str]] = []

    def program(self, name: str, text: str) -> Path:
        """Writes an executable."""
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def environment(self, **settings: str) -> dict[str, str]:
        """This process's, less what would steer a launcher, plus the stand-ins and ``settings``."""
        drop = ("JAX_", "SLURM_", "OMPI_", "FAKE", "XLA_", "CUDA_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
        own = {"PATH": f"{self.bin}:{os.environ['PATH']}", "FAKE_LOG": str(self.log), "PYTHON": str(self.python)}
        return kept | own | {"JAX_PLATFORMS": "cpu"} | settings

    def start(self, script: str, *arguments: str, **settings: str) -> subprocess.Popen[str]:
        """Starts a launcher in a session of its own."""
        launcher = subprocess.Popen(
            # A shell cannot trap what was ignored when it started, as under nohup.
            ["env", "--default-signal=HUP,INT,TERM", "bash", str(LAUNCH / script), *arguments],
            cwd=ROOT,
            env=self.environment(**settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.launchers.append(launcher)
        return launcher

    def clear(self) -> None:
        """Kills what a failed test left running."""
        for launcher in self.launchers:
            launcher.kill()
        for pid in self.left(0):
            os.kill(pid, signal.SIGKILL)

    def run(self, script: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Runs a launcher to its end, a minute at most."""
        process = self.start(script, *arguments, **settings)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def arguments(self, process: int, attempt: int = 1) -> list[str]:
        """What process number ``process`` was called with."""
        return (self.log / f"arguments.{process}.{attempt}").read_text().splitlines()

    def variables(self, process: int, attempt: int = 1) -> dict[str, str]:
        """The environment that it had."""
        text = (self.log / f"environment.{process}.{attempt}").read_text()
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def starts(self, process: int = 0) -> int:
        """How often it was started."""
        return len((self.log / f"starts.{process}").read_text().splitlines())

    def pids(self) -> list[int]:
        """Of every process that was started, and those that these noted down."""
        path = self.log / "pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def left(self, patience: float = 3.0) -> list[int]:
        """Those of ``pids`` that still run after ``patience`` seconds."""
        return left(self.pids(), patience)


def wait_for(path: Path, lines: int = 1, patience: float = 20.0) -> None:
    """Waits until a file has so many lines."""
    end = time.monotonic() + patience
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < end, f"{path.name}: fewer than {lines} lines after {patience} s"
        time.sleep(0.05)


def met(workdir: Path) -> list[list[str]]:
    """What each of two processes of meet.py wrote, a line for each time that they met."""
    return [(workdir / f"met.{process}").read_text().splitlines() for process in (0, 1)]


def times(count: int) -> list[list[str]]:
    """What ``met`` is when two processes of two devices each met so many times."""
    return [[f"process {process} of 2 devices 4 sum 3"] * count for process in (0, 1)]


def left(pids: list[int], patience: float = 3.0) -> list[int]:
    """Those that still run after ``patience`` seconds; one that nobody reaped yet does not run."""
    end = time.monotonic() + patience
    while running := [pid for pid in pids if _runs(pid)]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return running


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
