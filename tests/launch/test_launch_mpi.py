"""launch/gpu_mpi.sh with a stand-in for mpirun; test_launch_mpi_real.py has the real one."""

from __future__ import annotations

import shutil
import signal
import time

import pytest

from tests.launch.fakes import Fake, wait_for

pytestmark = pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux is not installed")

MPIRUN = r"""#!/bin/bash
[[ $1 == --version ]] && { echo "mpirun (Open MPI) ${FAKE_VERSION:-4.1.4}"; exit; }
printf '%s\n' "$@" >"$FAKE_LOG/mpirun"
while [[ $1 != setpriv ]]; do shift; done
trap 'kill -USR1 $(jobs -p)' USR1
trap 'kill -KILL $(jobs -p)' TERM
export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=${FAKE_LOCAL_SIZE:-1}
for rank in 0 1; do
  OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank "$@" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
  code=0
  wait "$pid" || code=$?
  ((status)) || status=$code
done
exit $status
"""
SAVES = """trap 'echo saved; exit 75' TERM; touch "$FAKE_LOG/ready.$process"; while :; do sleep 0.05; done"""
DEAF = """trap '' TERM; touch "$FAKE_LOG/ready.$process"; while :; do sleep 0.05; done"""


@pytest.fixture
def mpi(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake.program("mpirun", MPIRUN)
    monkeypatch.setenv("LAST_WORDS", "0")
    return fake


def options(mpi: Fake) -> str:
    return " ".join((mpi.log / "mpirun").read_text().split("\nsetpriv\n")[0].split("\n"))


def test_mpirun_4_lets_jax_find_the_others(mpi: Fake) -> None:
    done = mpi.run("gpu_mpi.sh", "--config=a b", GPUS="4", NCCL_DEBUG="INFO")
    assert done.returncode == 0, done.stderr
    assert mpi.arguments(1) == ["-m", "yatt_jax.main", "--config=a b", "--distributed"]
    assert mpi.variables(1)["JAX_LOCAL_DEVICE_IDS"] == "0,1,2,3"
    said = options(mpi)
    assert "--map-by ppr:1:node:oversubscribe" in said
    assert "--tag-output" in said
    assert "-x NCCL_DEBUG" in said
    assert "-x JAX_PLATFORMS" in said
    assert "-x PYTHON" in said
    assert "-x HOME" not in said


def test_a_process_for_each_gpu(mpi: Fake) -> None:
    assert mpi.run("gpu_mpi.sh", PER_HOST="2", FAKE_LOCAL_SIZE="2").returncode == 0
    assert "--map-by ppr:2:node:oversubscribe" in options(mpi)
    assert [mpi.variables(rank)["JAX_LOCAL_DEVICE_IDS"] for rank in (0, 1)] == ["0", "1"]


def test_gpus_are_counted(mpi: Fake) -> None:
    mpi.program("nvidia-smi", "#!/bin/bash\necho GPU 0\necho GPU 1\n")
    assert mpi.run("gpu_mpi.sh").returncode == 0
    assert mpi.variables(0)["JAX_LOCAL_DEVICE_IDS"] == "0,1"
    assert mpi.run("gpu_mpi.sh", CUDA_VISIBLE_DEVICES="4,5,7").returncode == 0
    assert mpi.variables(0, 2)["JAX_LOCAL_DEVICE_IDS"] == "0,1,2"


@pytest.mark.parametrize(
    ("hosts", "settings", "expected"),
    [
        ("# a comment\n\nfar1 slots=8\nfar2 slots=8\n", {}, "--coordinator=far1:"),
        ("localhost slots=2\n", {}, "--distributed"),
        ("localhost slots=2\n", {"FAKE_VERSION": "5.0.8"}, "--coordinator=localhost:"),
        ("far1\n", {"COORDINATOR": "10.0.0.7:1234"}, "--coordinator=10.0.0.7:1234"),
    ],
    ids=["elsewhere", "here", "version 5", "given"],
)
def test_where_process_0_is(mpi: Fake, hosts: str, settings: dict[str, str], expected: str) -> None:
    (mpi.log / "hosts").write_text(hosts)
    done = mpi.run("gpu_mpi.sh", HOSTFILE=str(mpi.log / "hosts"), **settings)
    assert done.returncode == 0, done.stderr
    assert f"--hostfile {mpi.log / 'hosts'}" in options(mpi)
    for rank in (0, 1):
        flags = mpi.arguments(rank)[2:]
        assert flags[0].startswith(expected)
        assert flags[1:] == ([] if expected == "--distributed" else ["--processes=2", f"--process={rank}"])
    assert mpi.arguments(0)[2] == mpi.arguments(1)[2]


def test_version_5_has_other_names_for_options(mpi: Fake) -> None:
    assert mpi.run("gpu_mpi.sh", FAKE_VERSION="5.0.8").returncode == 0
    assert "--output tag" in options(mpi)
    assert "--tag-output" not in options(mpi)
    assert mpi.arguments(0)[2].startswith("--coordinator=127.0.0.1:")


@pytest.mark.parametrize(("status", "starts"), [(1, 3), (75, 3), (2, 1), (0, 1)])
def test_restarts(mpi: Fake, status: int, starts: int) -> None:
    assert mpi.run("gpu_mpi.sh", RESTARTS="2", FAKE=f"exit {status}").returncode == status
    assert mpi.starts() == starts


def test_the_others_may_end_by_themselves_after_a_failure(mpi: Fake) -> None:
    mpi.program("mpirun", MPIRUN.replace("status=$code", "exit $code"))
    others = "sleep 1; echo last words; exit 4"
    done = mpi.run("gpu_mpi.sh", LAST_WORDS="3", RESTARTS="0", FAKE_0="exit 3", FAKE_1=others)
    assert (done.returncode, done.stdout) == (3, "last words\n")


def test_sigterm_saves_and_ends_the_restarts(mpi: Fake) -> None:
    launcher = mpi.start("gpu_mpi.sh", FAKE=SAVES)
    wait_for(mpi.log / "ready.0", lines=0)
    wait_for(mpi.log / "ready.1", lines=0)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGTERM)
    out, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 75, err
    assert out == "saved\nsaved\n"
    assert (mpi.starts(0), mpi.starts(1)) == (1, 1)
    assert mpi.left() == []


def test_what_does_not_stop_in_time_is_killed(mpi: Fake) -> None:
    launcher = mpi.start("gpu_mpi.sh", GRACE="1", FAKE_0=SAVES, FAKE_1=DEAF)
    wait_for(mpi.log / "ready.0", lines=0)
    wait_for(mpi.log / "ready.1", lines=0)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20) == 75
    assert mpi.left() == []


def test_a_process_dies_with_the_shell_that_mpirun_kills(mpi: Fake) -> None:
    launcher = mpi.start("gpu_mpi.sh", FAKE=DEAF)
    wait_for(mpi.log / "ready.0", lines=0)
    wait_for(mpi.log / "ready.1", lines=0)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert len(mpi.left(0)) == 2
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20) == 137
    assert mpi.left() == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"PER_HOST": "0"}, "PER_HOST = 0: must be at least 1"),
        ({"RESTARTS": "x"}, "RESTARTS = x: must be a whole number"),
        ({"HOSTFILE": "/no/such"}, "HOSTFILE = /no/such: no such file"),
    ],
)
def test_bad_input(mpi: Fake, settings: dict[str, str], said: str) -> None:
    done = mpi.run("gpu_mpi.sh", **settings)
    assert done.returncode == 2
    assert said in done.stderr


def test_another_mpi_is_refused(fake: Fake) -> None:
    fake.program("mpirun", "#!/bin/bash\necho HYDRA build details\n")
    done = fake.run("gpu_mpi.sh")
    assert done.returncode == 2
    assert "mpirun is not Open MPI's: HYDRA" in done.stderr
