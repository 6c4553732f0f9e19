"""Runs programs in sandboxes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from yatt_jax.errors import InputError, RunFailure

_log = logging.getLogger(__name__)
_GRACE_S = 30.0  # to start and to clean up, on a busy machine
_KEEPER = Path(__file__).with_name("keeper.py")

REASONS = ("time", "memory", "processes", "output", "file size", "disk", "killed")
Isolation = Literal["full", "best"]


class SandboxError(RunFailure):
    """The sandbox itself does not work."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may use; at the first limit it reaches it is ended, with everything that it started.

    Attributes:
      cpu_s: seconds of processor time of each process, a second of grace aside.
      wall_s: seconds on the clock.
      memory_mb: address space of each process, and memory of all together, in 10^6 bytes.
      file_mb: size of a file.
      disk_mb: size of all files together.
      output_kb: standard output and error together, in 10^3 bytes.
      processes: at one time, threads included.
    """

    cpu_s: float = 5.0
    wall_s: float = 15.0
    memory_mb: float = 1024.0
    file_mb: float = 16.0
    disk_mb: float = 64.0
    output_kb: float = 256.0
    processes: int = 16

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} = {getattr(self, field.name)}: must be above 0")

    def to_dict(self) -> dict[str, float]:
        """In the keeper's units."""
        return {
            "cpu_s": self.cpu_s,
            "wall_s": self.wall_s,
            "memory_bytes": int(self.memory_mb * 1e6),
            "file_bytes": int(self.file_mb * 1e6),
            "disk_bytes": int(self.disk_mb * 1e6),
            "output_bytes": int(self.output_kb * 1e3),
            "processes": self.processes,
        }


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
      status: its exit status, negative for a signal; None where it was ended.
      reason: the limit that it was ended for: "time", "memory", "processes", "output", "file size" or "disk"; "killed"
        where the system, or the program itself, ended the sandbox; else "".
      stdout: what it wrote.
      stderr: what it wrote.
      cpu_s: seconds of processor time; 0 where it was ended.
      wall_s: seconds on the clock.
      missing: walls that the kernel does not give, and why.
    """

    status: int | None
    reason: str
    stdout: str
    stderr: str
    cpu_s: float
    wall_s: float
    missing: Mapping[str, str]


class Sandbox:
    """Runs Python programs, each in a sandbox of its own; safe to use from several threads.

    A program has a working directory that is empty, sees the interpreter and the system's libraries read-only and
    nothing else of the machine, has no network, no environment and no rights, and cannot outlive its end. Namespaces
    give all that; where they are forbidden (as in most containers), Landlock and seccomp do, and processes are found by
    descent. As superuser, programs run under a user number that nobody has.

    Args:
      limits: of each program.
      isolation: "full" refuses to run where files or network cannot be kept from programs; "best" says so and goes on.
      python: the interpreter; empty: this one.
      namespaces: whether they are tried.

    Raises:
      InputError: an isolation that cannot be had.
      SandboxError: a trivial program does not run; the message says what is in the way.
    """

    def __init__(
        self, limits: Limits, *, isolation: Isolation = "full", python: str = "", namespaces: bool = True
    ) -> None:
        if sys.platform != "linux":
            raise InputError(f"programs are run in sandboxes on Linux only, and this is {sys.platform}")
        self._limits, self._namespaces = limits, namespaces
        self._python = python or sys.executable
        self._visible = _prefixes(self._python)
        found = self.run("print('ready')", "")
        if found.stdout != "ready\n":
            raise SandboxError(
                f"{self._python} does not run in a sandbox: {found.reason or found.stderr.strip()}; "
                "name another interpreter, which every user can read"
            )
        self.missing = {wall: why for wall, why in found.missing.items() if wall != "namespaces"}
        if self.missing:
            what = "; ".join(f"{wall}: {why}" for wall, why in self.missing.items())
            why = f" (namespaces: {found.missing['namespaces']})" if "namespaces" in found.missing else ""
            if isolation == "full":
                raise InputError(
                    f"the kernel does not let programs be kept from {what}{why}. Allow user namespaces, or set "
                    "isolation = 'best' to run them all the same"
                )
            _log.warning("programs run in sandboxes without all walls: %s%s", what, why)

    def run(self, program: str, given: str, limits: Limits | None = None) -> Outcome:
        """Runs a program to its end.

        Args:
          program: Python source.
          given: its standard input.
          limits: in place of the sandbox's own.

        Raises:
          SandboxError: the sandbox broke; nothing of it is left.
        """
        limits = limits or self._limits
        with _folder() as folder:
            task = {
                "parent": os.getpid(),
                "namespaces": self._namespaces,
                "folder": folder,
                "visible": self._visible,
                "limits": limits.to_dict(),
                "program": program,
                "input": given,
                "python": self._python,
            }
            outcome = Outcome(**_keep(json.dumps(task).encode(), limits.wall_s + _GRACE_S))
        if outcome.reason not in ("", *REASONS):
            raise SandboxError(f"a program could not be run in a sandbox: {outcome.reason}")
        return outcome


def _keep(task: bytes, limit_s: float) -> dict[str, Any]:
    """What the keeper says of a task."""
    process = subprocess.Popen(
        [sys.executable, "-E", "-s", "-S", str(_KEEPER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},
    )
    try:
        answer, said = process.communicate(task, limit_s)
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"a sandbox did not end within {limit_s:g} s") from error
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode == -signal.SIGKILL:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        nothing = {"stdout": "", "stderr": "", "cpu_s": 0.0, "wall_s": 0.0, "missing": {}}
        return {"status": None, "reason": "killed", **nothing}
    try:
        return json.loads(answer)
    except ValueError as error:
        words = said.decode("utf-8", "replace").strip().splitlines()
        raise SandboxError(f"a sandbox broke: {words[-1] if words else f'status {process.returncode}'}") from error


def _prefixes(python: str) -> list[str]:
    """The folders that an interpreter lives in."""
    if python == sys.executable:
        found = [sys.prefix, sys.base_prefix]
    else:
        ask = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"
        try:
            done = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, timeout=60, check=True)
            found = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise InputError(f"python = {python!r}: is no Python interpreter: {error}") from error
    real = [os.path.realpath(path) for path in found]
    return list(dict.fromkeys(path for path in (*found, *real) if path != "/"))


@contextlib.contextmanager
def _folder() -> Any:
    """An empty folder, removed afterwards whatever is in it."""
    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if os.path.exists(folder):  # folders without rights in them
            for where, _, _ in os.walk(folder):
                with contextlib.suppress(OSError):
                    os.chmod(where, 0o700)
            shutil.rmtree(folder, ignore_errors=True)
