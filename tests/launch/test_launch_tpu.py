"""launch/tpu_vm.sh with a stand-in for gcloud, whose workers are folders of this machine."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import time

import pytest

from tests.launch.fakes import Fake, wait_for

pytestmark = pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux is not installed")

# Each worker's home is a folder. Like the real one, ssh runs on all workers at once, with the status of a failed one.
GCLOUD = r"""#!/bin/bash
printf '%q ' "$@" >>"$FAKE_LOG/gcloud"
echo >>"$FAKE_LOG/gcloud"
for argument in "$@"; do
  case $argument in --command=*) command=${argument#*=} ;; esac
done
for worker in 0 1; do
  export HOME=$FAKE_LOG/worker$worker FAKE_PROCESS=$worker
  mkdir -p "$HOME"
  case $4 in
    ssh) (cd "$HOME" && exec bash -c "$command") & ;;
    scp) cp "$5" "$HOME/${6#*:}" & ;;
  esac
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
  wait "$pid"
  code=$?
  ((status)) || status=$code
done
exit $status
"""
# Makes the virtual environment of the stand-in.
PYTHON3 = r"""#!/bin/bash
[[ $1 == -c ]] && exit
mkdir -p "$3/bin" && cp "$PYTHON" "$3/bin/python"
"""
SAVES = """trap 'echo saved; exit 75' TERM; touch "$FAKE_LOG/ready.$process"; while :; do sleep 0.05; done"""
HERE = ("my-v5e", "us-west4-a")


@pytest.fixture
def tpu(fake: Fake) -> Fake:
    fake.program("gcloud", GCLOUD)
    fake.program("python3", PYTHON3)
    fake.program("hostname", '#!/bin/bash\necho "worker$FAKE_PROCESS"\n')
    return fake


def calls(tpu: Fake) -> list[list[str]]:
    return [shlex.split(line) for line in (tpu.log / "gcloud").read_text().splitlines()]


def test_print_shows_the_commands_and_runs_none(tpu: Fake) -> None:
    done = tpu.run("tpu_vm.sh", "--print", *HERE, "--config=a b", PROJECT="mine", SSH_FLAGS="--internal-ip")
    assert done.returncode == 0, done.stderr
    assert not (tpu.log / "gcloud").exists()
    copy, install, run = (shlex.split(line) for line in done.stdout.splitlines())
    place = ["--zone=us-west4-a", "--project=mine", "--internal-ip", "--worker=all"]
    vm = ["gcloud", "compute", "tpus", "tpu-vm"]
    assert copy == [*vm, "scp", copy[5], "my-v5e:yatt_jax.tgz", *place]
    assert install[:-1] == run[:-1] == [*vm, "ssh", "my-v5e", *place]
    assert install[-1].endswith("tpu_worker.sh install")
    remote = shlex.split(run[-1].removeprefix("--command="))
    assert remote[:3] == ["bash", "yatt_jax/launch/tpu_worker.sh", "run"]
    assert remote[4:] == ["--config=a b"]


def test_every_worker_installs_and_runs_the_command(tpu: Fake) -> None:
    done = tpu.run("tpu_vm.sh", *HERE, "--config=a b", "--workdir=w", FAKE="echo out; echo err >&2")
    assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        assert tpu.arguments(worker) == ["-m", "yatt_jax.main", "--config=a b", "--workdir=w", "--distributed"]
        assert (tpu.log / f"worker{worker}/yatt_jax/yatt_jax/main.py").exists()
        assert {f"[worker{worker}] {word}" for word in ("out", "err", "exit status 0")} <= set(done.stdout.splitlines())
    assert [call[3] for call in calls(tpu)] == ["scp", "ssh", "ssh"]


def test_a_failed_worker_stops_the_others_and_all_start_again(tpu: Fake) -> None:
    done = tpu.run(
        "tpu_vm.sh",
        *HERE,
        RESTARTS="1",
        GRACE="1",
        FAKE_0="((attempt == 1)) && kill -STOP $$; exit 0",
        FAKE_1="exit $((attempt == 1 ? 5 : 0))",
    )
    assert done.returncode == 0, done.stderr
    assert "a worker failed with status 5" in done.stderr
    assert "status 5: restart 1 of 1" in done.stderr
    assert "[worker0] exit status 137" in done.stdout
    assert (tpu.starts(0), tpu.starts(1)) == (2, 2)
    assert tpu.left() == []


@pytest.mark.parametrize(("status", "starts"), [(1, 2), (75, 2), (2, 1)])
def test_restarts_are_bounded(tpu: Fake, status: int, starts: int) -> None:
    assert tpu.run("tpu_vm.sh", *HERE, RESTARTS="1", FAKE=f"exit {status}").returncode == status
    assert tpu.starts() == starts


def test_sigterm_saves_on_every_worker(tpu: Fake) -> None:
    launcher = tpu.start("tpu_vm.sh", *HERE, FAKE=SAVES)
    wait_for(tpu.log / "ready.0", lines=0)
    wait_for(tpu.log / "ready.1", lines=0)
    time.sleep(0.5)
    launcher.send_signal(signal.SIGTERM)
    out, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 75, err
    assert {"[worker0] saved", "[worker1] saved"} <= set(out.splitlines())
    assert tpu.starts() == 1
    assert tpu.left() == []


def test_a_run_outlives_the_launcher_until_it_is_told_to_stop(tpu: Fake) -> None:
    launcher = tpu.start("tpu_vm.sh", *HERE, FAKE=SAVES)
    wait_for(tpu.log / "ready.0", lines=0)
    wait_for(tpu.log / "ready.1", lines=0)
    time.sleep(0.5)
    launcher.kill()
    assert len(tpu.left(0.5)) == 2
    done = tpu.run("tpu_vm.sh", "--stop", *HERE)
    assert done.returncode == 0, done.stderr
    assert tpu.left() == []
    launcher.communicate(timeout=20)


def test_a_repeated_command_of_the_same_attempt_follows_what_runs(tpu: Fake) -> None:
    """As gcloud does when its link to a worker broke."""
    assert tpu.run("tpu_vm.sh", *HERE, FAKE="echo once").returncode == 0
    (command,) = (part.removeprefix("--command=") for part in calls(tpu)[-1] if part.startswith("--command="))
    tpu.program("repeat", f'#!/bin/bash\ncd "$FAKE_LOG/worker0" && HOME=$PWD {command}\n')
    repeat = subprocess.run(
        [str(tpu.bin / "repeat")], env=tpu.environment(), capture_output=True, text=True, timeout=20, check=False
    )
    assert repeat.returncode == 0
    assert "once" in repeat.stdout
    assert tpu.starts(0) == 1


@pytest.mark.parametrize("arguments", [[], ["my-v5e"], ["my-v5e", "--config=x"]])
def test_bad_input(tpu: Fake, arguments: list[str]) -> None:
    done = tpu.run("tpu_vm.sh", *arguments)
    assert done.returncode == 2
    assert "the name and the zone" in done.stderr
