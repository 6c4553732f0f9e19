"""Runs a few local processes as one distributed job: the harness of every many-process test.

    from tests.processes import run_processes

    def job() -> None:                     # a function of its own: its imports stand inside
        import jax
        from tests.processes import connect
        connect()                          # jax.distributed.initialize, from the environment below
        print(len(jax.devices()))

    for done in run_processes(job, 2, 2):  # two processes of two CPU devices
        assert done.stdout.splitlines()[-1] == "4"   # collectives write to stdout, too

A program is a function (its source is run), a string of Python source, or a list of command line arguments. In a list
``{coordinator}``, ``{processes}`` and ``{process}`` are filled in, and a list whose first argument starts with "-" or
ends in ".py" is given to this Python: ``["-m", "yatt_jax.main", "--process={process}"]``. Each process also finds them
in ``YATT_TEST_COORDINATOR``, ``YATT_TEST_PROCESSES`` and ``YATT_TEST_PROCESS``.

A test of failures looks inside with ``start_processes``:

    with start_processes(job, 2, 1) as group:
        group.wait_for_text(1, "sampling", 30)
        group.signal(1, signal.SIGSTOP)
        done = group.wait(60)              # AssertionError, with all output, if any is still there

Every child is killed when its block ends, whether it runs, is stopped or hangs, and nothing but these children is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TAIL = 6000  # characters of each stream in an assertion message

Program = str | Sequence[str] | Callable[[], None]


class Finished(NamedTuple):
    """How a process ended; the return code is minus the signal where one killed it."""

    returncode: int
    stdout: str
    stderr: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Processes that run; process i is ``children[i]``, and writes to ``i.out`` and ``i.err`` in ``folder``."""

    children: Sequence[subprocess.Popen[bytes]]
    folder: Path

    def stdout(self, process: int) -> str:
        """What a process has written so far."""
        return (self.folder / f"{process}.out").read_text(errors="replace")

    def stderr(self, process: int) -> str:
        """What a process has written so far."""
        return (self.folder / f"{process}.err").read_text(errors="replace")

    def signal(self, process: int, number: int) -> None:
        """Sends a signal to a process and to what it started itself."""
        if self.children[process].poll() is None:
            os.killpg(self.children[process].pid, number)

    def wait_for_text(self, process: int, text: str, timeout: float) -> float:
        """Waits until a process has written ``text`` to either stream; returns the seconds that took."""
        begin = time.monotonic()
        while text not in self.stdout(process) and text not in self.stderr(process):
            assert time.monotonic() - begin < timeout, (
                f"process {process} did not write {text!r} within {timeout} s{self.describe()}"
            )
            assert self.children[process].poll() is None, (
                f"process {process} ended before it wrote {text!r}{self.describe()}"
            )
            time.sleep(0.02)
        return time.monotonic() - begin

    def wait_for_text_or_end(self, process: int, text: str, timeout: float) -> bool:
        """Waits until a process has written ``text`` to stdout, or has ended without; says whether it has ended."""
        begin = time.monotonic()
        while text not in self.stdout(process):
            if self.children[process].poll() is not None:
                return True
            assert time.monotonic() - begin < timeout, f"neither {text!r} nor an end{self.describe()}"
            time.sleep(0.02)
        return False

    def wait_for_end(self, seconds: float, processes: Sequence[int]) -> bool:
        """Waits so long, or until all of these processes have ended; says whether they have."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(self.children[i].poll() is None for i in processes):
            time.sleep(0.01)
        return all(self.children[i].poll() is not None for i in processes)

    def wait(self, timeout: float, processes: Sequence[int] | None = None) -> list[Finished]:
        """Waits until these processes (all by default) have ended, and returns how."""
        chosen = range(len(self.children)) if processes is None else processes
        deadline = time.monotonic() + timeout
        while any(self.children[i].poll() is None for i in chosen):
            assert time.monotonic() < deadline, f"still running after {timeout} s{self.describe()}"
            time.sleep(0.02)
        return [Finished(self.children[i].wait(), self.stdout(i), self.stderr(i)) for i in chosen]

    def describe(self) -> str:
        """State and last output of every process, for messages."""
        parts = []
        for i, child in enumerate(self.children):
            code = child.poll()
            parts.append(f"\n--- process {i}: {'running' if code is None else f'returned {code}'}")
            for name, text in (("stdout", self.stdout(i)), ("stderr", self.stderr(i))):
                if text.strip():
                    parts.append(f"\n--- process {i} {name}:\n{text[-TAIL:]}")
        return "".join(parts)

    def kill(self) -> None:
        """Ends every process, also stopped ones, with what it started."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in self.children:
            child.wait()


def run_processes(
    program: Program,
    n: int,
    devices_each: int,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    *,
    check: bool = True,
) -> list[Finished]:
    """Runs a program as ``n`` processes of ``devices_each`` CPU devices to their end.

    Args:
      program: see the module.
      n: number of processes.
      devices_each: devices of each.
      timeout: seconds until all must have ended; else they are killed, and the AssertionError holds their output.
      env: further environment variables.
      check: an AssertionError with the output of all where one returns anything but 0.
    """
    with start_processes(program, n, devices_each, env) as group:
        done = group.wait(timeout)
        if check:
            failed = [i for i, one in enumerate(done) if one.returncode != 0]
            assert not failed, f"processes {failed} failed{group.describe()}"
        return done


@contextlib.contextmanager
def start_processes(
    program: Program, n: int, devices_each: int, env: Mapping[str, str] | None = None
) -> Iterator[Group]:
    """Starts the processes; all are gone when the block ends. Arguments as in ``run_processes``."""
    coordinator = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="processes-") as name, contextlib.ExitStack() as files:
        folder = Path(name)
        words = _command(program, folder)
        children: list[subprocess.Popen[bytes]] = []
        group = Group(children, folder)
        try:
            for i in range(n):
                out, err = (files.enter_context((folder / f"{i}.{end}").open("wb")) for end in ("out", "err"))
                filled = [
                    w.replace("{coordinator}", coordinator).replace("{processes}", str(n)).replace("{process}", str(i))
                    for w in words
                ]
                children.append(
                    subprocess.Popen(
                        filled,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        cwd=ROOT,
                        env=_environment(coordinator, n, i, devices_each) | dict(env or {}),
                        start_new_session=True,
                    )
                )
            yield group
        finally:
            group.kill()


def connect(initialization_timeout: int = 30, heartbeat_timeout_seconds: int = 100) -> int:
    """Joins the job of the surrounding ``run_processes``; call it in a program before any other use of jax.

    Returns:
      The number of this process.
    """
    import jax

    process = int(os.environ["YATT_TEST_PROCESS"])
    jax.distributed.initialize(
        os.environ["YATT_TEST_COORDINATOR"],
        int(os.environ["YATT_TEST_PROCESSES"]),
        process,
        initialization_timeout=initialization_timeout,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        coordinator_bind_address=os.environ["YATT_TEST_COORDINATOR"],
    )
    return process


def free_port() -> int:
    """A port of the loopback interface that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(coordinator: str, n: int, process: int, devices_each: int) -> dict[str, str]:
    return {
        # Nothing here talks to anything but loopback, and a proxy for that would hang.
        **{key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")},
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices_each),
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,
        # The cache of tests/conftest.py.
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "YATT_TEST_COORDINATOR": coordinator,
        "YATT_TEST_PROCESSES": str(n),
        "YATT_TEST_PROCESS": str(process),
    }


def _command(program: Program, folder: Path) -> list[str]:
    if callable(program):
        name = getattr(program, "__name__", "")
        source = textwrap.dedent(inspect.getsource(program))
        program = f"from __future__ import annotations\n\n{source}\n\nif __name__ == '__main__':\n    {name}()\n"
    if isinstance(program, str):
        script = folder / "program.py"
        script.write_text(textwrap.dedent(program))
        program = [str(script)]
    words = list(program)
    if words[0].startswith("-") or words[0].endswith(".py"):
        words = [sys.executable, *words]
    # Where the tests themselves are killed, their children go with them.
    together = shutil.which("setpriv")
    return [together, "--pdeathsig", "KILL", *words] if together else words
