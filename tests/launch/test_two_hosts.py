"""Two hosts with addresses of their own: network namespaces joined by a link, a process in each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.fakes import ROOT, RUN, left, met, times, wait_for

HOSTS = {"yatt-a": "10.77.31.1", "yatt-b": "10.77.31.2"}


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)


def _remove() -> None:
    for name in HOSTS:
        _ip("netns", "delete", name)


def _why_not() -> str:
    """Why namespaces cannot be had here; empty when they can."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "not installed: ip or unshare"
    if os.geteuid() != 0:
        return "network namespaces need root"
    _remove()
    made = _ip("netns", "add", "yatt-a")
    works = _ip("netns", "exec", "yatt-a", "unshare", "--uts", "hostname", "yatt-a")
    _remove()
    return (made.stderr or works.stderr).strip()


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Both namespaces, joined; the file that maps their names to their addresses."""
    if reason := _why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    file = tmp_path_factory.mktemp("hosts") / "hosts"
    file.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in HOSTS.items()))
    commands = [f"netns add {name}" for name in HOSTS]
    commands += ["link add yatt-a0 netns yatt-a type veth peer name yatt-b0 netns yatt-b"]
    for name, address in HOSTS.items():
        commands += [f"-n {name} addr add {address}/24 dev {name}0"]
        commands += [f"-n {name} link set {name}0 up", f"-n {name} link set lo up"]
    try:
        for command in commands:
            done = _ip(*command.split())
            assert done.returncode == 0, f"ip {command}: {done.stderr}"
        yield file
    finally:
        _remove()


def start(hosts: Path, name: str, command: list[str], **settings: str) -> subprocess.Popen[str]:
    """A process in a namespace, with the namespace's host name and the hosts file."""
    inside = f'hostname {name}; mount --bind "{hosts}" /etc/hosts; exec "$@"'
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.Popen(
        ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "bash", "-c", inside, "bash", *command],
        cwd=ROOT,
        env=kept | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"} | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]], patience: float) -> list[str]:
    """Their output, once they have ended; what has not ended in time is killed and fails the test."""
    try:
        return [process.communicate(timeout=patience)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
        assert left([process.pid for process in processes]) == []


def test_processes_on_two_hosts_meet(hosts: Path, tmp_path: Path) -> None:
    meet = [sys.executable, str(Path(__file__).parent / "meet.py"), f"--coordinator={HOSTS['yatt-a']}:4711"]
    meet += ["--processes=2", f"--workdir={tmp_path}"]
    processes = [start(hosts, name, [*meet, f"--process={i}"]) for i, name in enumerate(HOSTS)]
    outs = finish(processes, 120)
    assert [process.returncode for process in processes] == [0, 0], outs
    assert met(tmp_path) == times(1)


def train(hosts: Path, workdir: Path, *more: str) -> list[subprocess.Popen[str]]:
    """A run with a process on each host."""
    flags = [*RUN, *more, f"--workdir={workdir}", f"--coordinator={HOSTS['yatt-a']}:4712", "--processes=2"]
    command = [sys.executable, "-m", "yatt_jax.main", *flags]
    return [start(hosts, name, [*command, f"--process={i}"], JAX_NUM_CPU_DEVICES="1") for i, name in enumerate(HOSTS)]


def test_two_steps_of_training_on_two_hosts(hosts: Path, tmp_path: Path) -> None:
    processes = train(hosts, tmp_path / "run")
    outs = finish(processes, 240)
    assert [process.returncode for process in processes] == [0, 0], outs
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) >= 2


def test_a_cut_link_ends_the_run_on_both_hosts(hosts: Path, tmp_path: Path) -> None:
    processes = train(hosts, tmp_path / "run", "--config.steps=100000", "--config.controller.timeout_s=10")
    try:
        wait_for(tmp_path / "run/metrics.jsonl", lines=2, patience=200)
        assert _ip("-n", "yatt-b", "link", "set", "yatt-b0", "down").returncode == 0
        cut = time.monotonic()
        outs = finish(processes, 40)
    finally:
        _ip("-n", "yatt-b", "link", "set", "yatt-b0", "up")
    assert time.monotonic() - cut < 10 + 5  # 5 s for this machine, which may be busy
    assert all(process.returncode > 0 for process in processes), outs
    assert "process 1 (host yatt-b" in outs[0]
    assert "process 0 (host yatt-a" in outs[1]
