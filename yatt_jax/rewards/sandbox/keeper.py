"""The process that keeps a program in its sandbox: run as a script, it reads a task and writes what became of it.

It runs outside of this package, with this folder alone on its path. There are three processes: the *keeper* (this one)
puts up the walls, watches and kills; the *init* is process 1 behind them, and takes everything there with it when it
ends; the *program* is its child.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

from system import (
    LIBC,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    below,
    end,
    folder_bytes,
    own_bytes,
    release,
)
from walls import DEVICES, LIBRARIES, become_nobody, forbid_files, forbid_sockets, put_up_walls

LOOK_S = 0.02  # between two looks at memory and processes


def main() -> None:
    """Runs the task on the standard input and writes a JSON object to the standard output."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    task = json.loads(sys.stdin.buffer.read())
    if os.getppid() != task["parent"]:  # it died before the signal was asked for
        sys.exit(1)
    missing = {"namespaces": "not asked for"}
    if task["namespaces"]:
        missing = put_up_walls(task["folder"], task["visible"], task["limits"]["disk_bytes"])
    json.dump(Keeper(task, missing).run(), sys.stdout)


class Keeper:
    """Starts the program, feeds and watches it, and ends everything that it started.

    Args:
      task: what to run.
      missing: walls that could not be put up, and why.
    """

    def __init__(self, task: dict[str, Any], missing: dict[str, str]) -> None:
        self._task, self._limits, self._missing = task, task["limits"], missing
        self._input = task["input"].encode("utf-8", "replace")
        self._output = {"stdout": b"", "stderr": b""}
        self._reason = ""

    def run(self) -> dict[str, Any]:
        """What became of the program."""
        box, program = os.path.join(self._task["folder"], "box"), os.path.join(self._task["folder"], "program.py")
        os.mkdir(box)
        os.chmod(box, 0o777)
        with open(program, "w", encoding="utf-8", errors="replace") as file:
            file.write(self._task["program"])
        os.chmod(program, 0o644)
        inner: dict[str, int] = {}
        outer: dict[str, int] = {}
        for name in ("stdin", "stdout", "stderr", "report"):
            read, write = os.pipe()
            inner[name], outer[name] = (read, write) if name == "stdin" else (write, read)
        started = time.monotonic()
        init = os.fork()
        if init == 0:
            try:
                Init(self._task, self._missing, inner, list(outer.values())).run()
            finally:
                os._exit(1)
        for number in inner.values():
            os.close(number)
        try:
            report = self._watch(init, outer, started + self._limits["wall_s"])
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end(init)
        found = json.loads(report) if report else {}
        missing = self._missing | found.get("missing", {})
        reason = self._reason or found.get("reason", "killed")
        return {
            "status": found.get("status"),
            "reason": reason,
            "stdout": self._output["stdout"].decode("utf-8", "replace"),
            "stderr": self._output["stderr"].decode("utf-8", "replace"),
            "cpu_s": found.get("cpu_s", 0.0),
            "wall_s": time.monotonic() - started,
            "missing": missing,
        }

    def _watch(self, init: int, pipes: dict[str, int], deadline: float) -> bytes:
        """Moves bytes until the init has reported, or a limit is reached."""
        poller, report = select.poll(), b""
        names = {number: name for name, number in pipes.items()}
        for name, number in pipes.items():
            os.set_blocking(number, False)
            poller.register(number, select.POLLOUT if name == "stdin" else select.POLLIN)
        look = time.monotonic()
        while pipes["report"] in names and not self._reason:
            now = time.monotonic()
            if now >= deadline:
                self._reason = "time"
                break
            if now >= look:
                self._look(init)
                look = time.monotonic() + LOOK_S
            for number, _ in poller.poll(max(0, min(look, deadline) - now) * 1000):
                name = names[number]
                if name == "stdin":
                    done = self._feed(number)
                else:
                    data = os.read(number, 65536)
                    done = not data
                    if name == "report":
                        report += data
                    else:
                        self._take(name, data)
                if done:
                    poller.unregister(number)
                    os.close(number)
                    del names[number]
        if not self._reason:  # what was written just before the end
            for name in ("stdout", "stderr"):
                try:
                    while pipes[name] in names and (data := os.read(pipes[name], 65536)):
                        self._take(name, data)
                except BlockingIOError:
                    pass
        return report

    def _feed(self, number: int) -> bool:
        try:
            self._input = self._input[os.write(number, self._input[:65536]) :] if self._input else b""
        except BrokenPipeError:  # the program does not read on
            return True
        return not self._input

    def _take(self, name: str, data: bytes) -> None:
        self._output[name] += data
        if sum(map(len, self._output.values())) > self._limits["output_bytes"]:
            self._reason = "output"

    def _look(self, init: int) -> None:
        """Adds up what the processes behind the walls hold."""
        found = below(init)
        if len(found) > self._limits["processes"]:
            self._reason = "processes"
        if sum(map(own_bytes, found)) > self._limits["memory_bytes"]:
            self._reason = "memory"
        if self._missing and folder_bytes(os.path.join(self._task["folder"], "box")) > self._limits["disk_bytes"]:
            self._reason = "disk"


class Init:
    """Process 1 behind the walls: starts the program and reports its end, with which everything ends.

    Args:
      task: what to run.
      missing: walls that could not be put up.
      pipes: ends of the pipes for the program and for the report.
      foreign: numbers of the keeper's ends.
    """

    def __init__(
        self, task: dict[str, Any], missing: dict[str, str], pipes: dict[str, int], foreign: list[int]
    ) -> None:
        self._task, self._walled, self._pipes, self._foreign = task, not missing, pipes, foreign
        # Whether the kernel counts the processes of this sandbox apart from all others of the same user.
        self._counted = self._walled and release() >= (5, 14)

    def run(self) -> None:
        """Does not return."""
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (*self._foreign, 0, 1):
            os.close(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        report: dict[str, Any] = {}
        try:
            missing = self._confine()
            program = os.fork()
            if program == 0:
                self._become()
            for name in ("stdin", "stdout", "stderr"):
                os.close(self._pipes[name])
            report = self._wait(program) | {"missing": missing}
        except OSError as error:
            report = {"reason": f"the sandbox cannot be entered: {error}"}
        os.write(self._pipes["report"], json.dumps(report).encode())
        os._exit(0)

    def _confine(self) -> dict[str, str]:
        """The walls that each process puts up for itself; returns those that cannot be had."""
        task, missing = self._task, {}
        if self._walled:
            os.chroot(task["folder"])
        folder = "/" if self._walled else task["folder"]
        box = os.path.join(folder, "box")
        os.chdir(box)
        os.umask(0o022)
        if os.geteuid() == 0:
            if not self._walled:
                os.chmod(folder, 0o711)
            become_nobody()
            self._counted = True
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # another user's number clears it
        if not self._walled:
            if fault := forbid_files(box, [os.path.join(folder, "program.py"), *LIBRARIES, *DEVICES, *task["visible"]]):
                missing["files"] = fault
            if fault := forbid_sockets():
                missing["network"] = fault
        return missing

    def _become(self) -> None:
        """Becomes the program."""
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            for number, name in enumerate(("stdin", "stdout", "stderr")):
                os.dup2(self._pipes[name], number)
            limits = self._task["limits"]
            for kind, most in (
                (resource.RLIMIT_CPU, int(limits["cpu_s"]) + 1),
                (resource.RLIMIT_AS, limits["memory_bytes"]),
                (resource.RLIMIT_FSIZE, limits["file_bytes"]),
                (resource.RLIMIT_NOFILE, 128),
                (resource.RLIMIT_CORE, 0),
            ):
                hard = resource.getrlimit(kind)[1]
                value = most if hard == resource.RLIM_INFINITY else min(most, hard)
                resource.setrlimit(kind, (value, value))
            if self._counted:
                most = limits["processes"] + 1  # the init counts
                resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
            for number in range(1, signal.NSIG):
                if number not in (signal.SIGKILL, signal.SIGSTOP):
                    with contextlib.suppress(OSError, ValueError):
                        signal.signal(number, signal.SIG_DFL)
            folder = "/" if self._walled else self._task["folder"]
            box, script = os.path.join(folder, "box"), os.path.join(folder, "program.py")
            environment = {"HOME": box, "TMPDIR": box, "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
            environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            # -I: neither the environment nor the working directory has a say in what is imported.
            os.execve(self._task["python"], [self._task["python"], "-I", "-B", "-X", "utf8", script], environment)
        except BaseException as error:
            os.write(2, f"the sandbox cannot start the program: {error}\n".encode())
        finally:
            os._exit(127)

    def _wait(self, program: int) -> dict[str, Any]:
        """Reaps whatever ends until the program does."""
        while True:
            ended, status, used = os.wait4(-1, 0)
            if ended == program:
                break
        code = os.waitstatus_to_exitcode(status)
        reasons = {-signal.SIGXCPU: "time", -signal.SIGXFSZ: "file size"}
        cpu = used.ru_utime + used.ru_stime
        if code == -signal.SIGKILL and cpu >= self._task["limits"]["cpu_s"]:
            reasons[code] = "time"
        return {"status": code, "cpu_s": cpu, "reason": reasons.get(code, "")}


if __name__ == "__main__":
    main()
