"""launch/slurm.sbatch under a real Slurm of one node, whose daemons are this test's own and listen on loopback.

Needs root and Debian's packages slurm-wlm and munge. The daemons' files are in a folder of the test, their ports
are free ones, and they are stopped by number at the end.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.launch.fakes import LAUNCH, ROOT, RUN, left, met, times

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian: slurm-wlm, munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons need root"),
]

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmdPort={slurmd}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=3
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
MpiDefault=none
ReturnToService=2
KillWait=5
InactiveLimit=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A running Slurm of one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "JAX_", "XLA_"))}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": os.environ["PATH"] + ":/usr/sbin"}

    def begin(self) -> None:
        """Starts the daemons and waits until the node is idle."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        host = socket.gethostname().split(".")[0]
        ctld, slurmd = _free_ports(2)
        conf = CONF.format(host=host, ctld=ctld, slurmd=slurmd, folder=self.folder, cpus=os.cpu_count())
        (self.folder / "slurm.conf").write_text(conf)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D", "-N", host)
        end = time.monotonic() + 60
        while "idle" not in self.call("sinfo", "--noheader", "--format=%T", check=False):
            assert time.monotonic() < end, self.logs()
            time.sleep(0.5)

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("wb") as out:
            self.daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
            )
        time.sleep(1)

    def end(self) -> None:
        """Cancels what runs and stops the daemons, the last one first."""
        self.call("scancel", "--user=root", check=False)
        end = time.monotonic() + 30  # a stopped task is killed after KillWait
        while self.call("squeue", "--noheader", check=False).strip() and time.monotonic() < end:
            time.sleep(0.5)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def call(self, *command: str, settings: Mapping[str, str] | None = None, check: bool = True) -> str:
        """Output of one of Slurm's commands."""
        done = subprocess.run(
            command,
            env=self.environment | dict(settings or {}),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr + self.logs()
        return done.stdout

    def submit(self, workdir: Path, *options: str, command: Sequence[str] = (), **settings: str) -> str:
        """Submits the script, with the stand-in for the run as interpreter or with the real ``command``.

        Returns:
          The job's number.
        """
        workdir.mkdir()
        python = workdir / "python"
        python.write_text(f'#!/bin/bash\nexec "{sys.executable}" "{Path(__file__).parent}/meet.py" "$@"\n')
        python.chmod(0o755)
        given = ["--parsable", "--ntasks-per-node=2", f"--output={workdir}/log", *options, str(LAUNCH / "slurm.sbatch")]
        own = {"PYTHON": str(python), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
        if command:
            own |= {"PYTHON": sys.executable, "JAX_NUM_CPU_DEVICES": "1"}
            return self.call("sbatch", *given, *command, f"--workdir={workdir}/run", settings=own).strip()
        return self.call("sbatch", *given, "--config=x", f"--workdir={workdir}", settings=own | settings).strip()

    def wait(self, job: str, patience: float = 120) -> dict[str, str]:
        """What Slurm says about a job once it has ended."""
        end = time.monotonic() + patience
        while True:
            said = dict(pair.split("=", 1) for pair in self.call("scontrol", "show", "job", job).split() if "=" in pair)
            if said["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"):
                return said
            assert time.monotonic() < end, self.logs()
            time.sleep(0.5)

    def logs(self) -> str:
        """The last lines of the daemons."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-2000:]}" for file in files)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """One Slurm for all tests here."""
    running = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        running.begin()
        yield running
    finally:
        running.end()
        assert left([daemon.pid for daemon in running.daemons]) == []


def test_tasks_find_each_other_and_the_job_completes(slurm: Slurm, tmp_path: Path) -> None:
    said = slurm.wait(slurm.submit(tmp_path / "w"))
    log = (tmp_path / "w/log").read_text()
    assert said["JobState"] == "COMPLETED", log
    assert met(tmp_path / "w") == times(1)


def test_two_steps_of_training(slurm: Slurm, tmp_path: Path) -> None:
    said = slurm.wait(slurm.submit(tmp_path / "w", command=RUN), patience=240)
    assert said["JobState"] == "COMPLETED", (tmp_path / "w/log").read_text()
    assert len((tmp_path / "w/run/metrics.jsonl").read_text().splitlines()) >= 2
    assert (tmp_path / "w/run/samples.1.jsonl").exists()


@pytest.mark.parametrize(("word", "status"), [("fail", 3), ("stop", 137)])
def test_a_failed_or_stopped_task_ends_the_step_which_is_started_again(
    slurm: Slurm, tmp_path: Path, word: str, status: int
) -> None:
    begun = time.monotonic()
    said = slurm.wait(slurm.submit(tmp_path / "w", RESTARTS="1", GRACE="6", MEET=f"{word},end"))
    log = (tmp_path / "w/log").read_text()
    assert said["JobState"] == "COMPLETED", log
    assert time.monotonic() - begun < 90
    assert met(tmp_path / "w") == times(2)
    assert f"status {status}: restart" in log


def test_bad_input_fails_the_job_at_once(slurm: Slurm, tmp_path: Path) -> None:
    said = slurm.wait(slurm.submit(tmp_path / "w", MEET="bad"))
    assert (said["JobState"], said["ExitCode"], said["Restarts"]) == ("FAILED", "2:0", "0")
    assert (tmp_path / "w/attempts.0").read_text() == "x"


def test_ahead_of_the_time_limit_the_run_saves_and_the_job_is_requeued(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit(tmp_path / "w", "--time=2", "--signal=TERM@45", MEET="wait,end")
    said = slurm.wait(job, patience=300)
    log = (tmp_path / "w/log").read_text()
    assert (said["JobState"], said["Restarts"]) == ("COMPLETED", "1"), log
    assert "stopped early: back into the queue, 1 of 3" in log
    assert log.count("1 node(s)") == 2  # appended to
    assert met(tmp_path / "w") == times(2)
