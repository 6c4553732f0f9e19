"""launch/local.sh with a stand-in for the run: statuses, time limits, signals, restarts, and nothing left behind."""

from __future__ import annotations

import shutil
import signal
import time

import pytest

from tests.launch.fakes import Fake, left, wait_for

pytestmark = pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux is not installed")

STOP = """touch "$FAKE_LOG/ready.$process"; kill -STOP $$"""
SAVES = """trap 'echo saved; exit 75' TERM; echo up; touch "$FAKE_LOG/ready.$process"; while :; do sleep 0.05; done"""
DEAF = """trap '' TERM; touch "$FAKE_LOG/ready.$process"; while :; do sleep 0.05; done"""


def test_processes_share_devices_and_meet_on_loopback(fake: Fake) -> None:
    done = fake.run(
        "local.sh",
        "3",
        "--config=a b",
        "--workdir=w",
        DEVICES="6",
        FAKE="echo out $process; echo err $process >&2",
    )
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[1] out 1", "[2] out 2", "out 0"]
    assert sorted(done.stderr.splitlines()) == ["[1] err 1", "[2] err 2", "err 0"]
    for process in range(3):
        flags = fake.arguments(process)
        assert flags[:4] == ["-m", "yatt_jax.main", "--config=a b", "--workdir=w"]
        assert flags[5:] == ["--processes=3", f"--process={process}"]
        assert flags[4].startswith("--coordinator=127.0.0.1:")
        assert flags[4] == fake.arguments(0)[4]
        variables = fake.variables(process)
        assert (variables["JAX_PLATFORMS"], variables["JAX_NUM_CPU_DEVICES"]) == ("cpu", "2")
        assert variables["JAX_COORDINATOR_BIND_ADDRESS"] == flags[4].removeprefix("--coordinator=")


@pytest.mark.parametrize(
    ("settings", "each"),
    [({}, "1"), ({"JAX_NUM_CPU_DEVICES": "8"}, "4"), ({"JAX_NUM_CPU_DEVICES": "8", "DEVICES": "2"}, "1")],
)
def test_devices_default_to_what_jax_was_told_else_one_each(fake: Fake, settings: dict[str, str], each: str) -> None:
    assert fake.run("local.sh", "2", **settings).returncode == 0
    assert fake.variables(1)["JAX_NUM_CPU_DEVICES"] == each


@pytest.mark.parametrize("status", [1, 2, 75])
def test_status_is_that_of_the_process_that_failed_first(fake: Fake, status: int) -> None:
    done = fake.run("local.sh", "2", FAKE_0="sleep 0.6; exit 9", FAKE_1=f"exit {status}")
    assert done.returncode == status
    assert f"process 1 ended with status {status}" in done.stderr


@pytest.mark.parametrize("other", [STOP, DEAF], ids=["stopped", "deaf"])
def test_what_still_runs_after_a_failure_is_killed(fake: Fake, other: str) -> None:
    begun = time.monotonic()
    done = fake.run("local.sh", "3", GRACE="1", FAKE_0="sleep 0.2; exit 3", FAKE_1=other, FAKE_2="sleep 0.4")
    assert done.returncode == 3
    assert time.monotonic() - begun < 10
    assert "killing what still runs: process 1" in done.stderr
    assert "process 1 was killed by signal 9" in done.stderr
    assert fake.left() == []


def test_others_have_the_grace_period_to_end_by_themselves(fake: Fake) -> None:
    done = fake.run("local.sh", "2", GRACE="30", FAKE_0="exit 1", FAKE_1="sleep 1; echo last words; exit 4")
    assert done.returncode == 1
    assert done.stdout == "[1] last words\n"


def test_a_process_killed_from_outside_counts_as_failed(fake: Fake) -> None:
    assert fake.run("local.sh", "2", GRACE="5", FAKE_1="kill -KILL $$", FAKE_0="sleep 0.3; exit 1").returncode == 137


def test_children_of_processes_do_not_outlive_them(fake: Fake) -> None:
    done = fake.run("local.sh", "2", FAKE='sleep 1000 & echo $! >>"$FAKE_LOG/pids"')
    assert done.returncode == 0
    assert len(fake.pids()) == 4
    assert fake.left() == []


def test_restarts_repeat_the_command_on_another_port(fake: Fake) -> None:
    text = "((attempt > 2)) && exit 0; exit $attempt$attempt"  # 11, 22, then 0
    done = fake.run("local.sh", "2", "--workdir=w", RESTARTS="2", FAKE_0=text, FAKE_1="sleep 0.3")
    assert done.returncode == 0, done.stderr
    assert (fake.starts(0), fake.starts(1)) == (3, 3)
    assert "status 22: restart 2 of 2" in done.stderr
    assert [a for a in fake.arguments(0, 3) if "coordinator" not in a] == [
        a for a in fake.arguments(0, 1) if "coordinator" not in a
    ]
    assert len({fake.arguments(0, attempt)[3] for attempt in (1, 2, 3)}) > 1


@pytest.mark.parametrize(("status", "starts"), [(1, 3), (75, 3), (2, 1)])
def test_restarts_are_bounded_and_never_for_bad_input(fake: Fake, status: int, starts: int) -> None:
    assert fake.run("local.sh", "1", RESTARTS="2", FAKE_0=f"exit {status}").returncode == status
    assert fake.starts() == starts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_every_process_as_sigterm_and_end_the_restarts(fake: Fake, number: int) -> None:
    launcher = fake.start("local.sh", "2", RESTARTS="3", FAKE=SAVES)
    wait_for(fake.log / "ready.1", lines=0)
    wait_for(fake.log / "ready.0", lines=0)
    time.sleep(0.3)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 75, err
    assert sorted(out.splitlines()) == ["[1] saved", "[1] up", "saved", "up"]
    assert (fake.starts(0), fake.starts(1)) == (1, 1)
    assert fake.left() == []


def test_what_does_not_stop_in_time_after_sigterm_is_killed(fake: Fake) -> None:
    launcher = fake.start("local.sh", "2", GRACE="1", FAKE_0=SAVES, FAKE_1=STOP)
    wait_for(fake.log / "ready.0", lines=0)
    wait_for(fake.log / "ready.1", lines=0)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=20) == 75
    assert fake.left() == []


def test_a_second_signal_kills_at_once(fake: Fake) -> None:
    launcher = fake.start("local.sh", "2", GRACE="60", FAKE=DEAF)
    for process in range(2):
        wait_for(fake.log / f"ready.{process}", lines=0)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=20) == 137
    assert fake.left() == []


def test_processes_die_with_the_launcher(fake: Fake) -> None:
    launcher = fake.start("local.sh", "3", FAKE=DEAF, FAKE_2=STOP)
    for process in range(3):
        wait_for(fake.log / f"ready.{process}", lines=0)
    time.sleep(0.3)
    assert len(left(fake.pids(), 0)) == 3
    launcher.kill()
    launcher.communicate(timeout=20)  # both pipes closed: the prefixing programs are gone too
    assert fake.left() == []


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        ([], {}, "first comes the number of processes"),
        (["--config=x"], {}, "first comes the number of processes"),
        (["0"], {}, "first comes the number of processes"),
        (["2"], {"DEVICES": "3"}, "DEVICES = 3: must be a multiple of the 2 processes"),
        (["4"], {"DEVICES": "2"}, "DEVICES = 2: must be a multiple of the 4 processes"),
        (["2"], {"RESTARTS": "many"}, "RESTARTS = many: must be a whole number"),
        (["2"], {"GRACE": "-1"}, "GRACE = -1: must be a whole number"),
        (["2"], {"JAX_PLATFORMS": "cuda"}, "set JAX_PLATFORMS=cpu"),
        (["2"], {"PYTHON": "/no/such/python"}, "/no/such/python is missing"),
    ],
)
def test_bad_input(fake: Fake, arguments: list[str], settings: dict[str, str], said: str) -> None:
    done = fake.run("local.sh", *arguments, **settings)
    assert done.returncode == 2
    assert said in done.stderr
    assert fake.pids() == []


def test_help_is_the_head_of_the_script(fake: Fake) -> None:
    done = fake.run("local.sh", "--help")
    assert done.returncode == 0
    assert "DEVICES" in done.stdout
    assert "set -euo" not in done.stdout
