"""What the sandbox asks of the kernel, and how it finds and ends processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import time

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 1 << 14, 1 << 18


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """The system call.

    Raises:
      OSError: it failed.
    """
    encoded = [text.encode() if text else None for text in (source, target, kind, options)]
    check(LIBC.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]), target)


def check(result: int, what: str) -> None:
    """Raises what a system call left in errno."""
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


def release() -> tuple[int, int]:
    """Version of the kernel."""
    major, minor = re.findall(r"\d+", os.uname().release)[:2]
    return int(major), int(minor)


def below(init: int) -> list[int]:
    """The processes that descend from the init."""
    found: list[int] = []
    waiting = children(init)
    while waiting:
        process = waiting.pop()
        found.append(process)
        waiting += children(process)
    return found


def children(process: int) -> list[int]:
    """The children of a process, of all of its threads."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:  # it has ended
        pass
    return found


def own_bytes(process: int) -> int:
    """Memory that a process shares with no file, in bytes."""
    try:
        with open(f"/proc/{process}/statm") as file:
            _, resident, shared = file.read().split()[:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


def folder_bytes(folder: str) -> int:
    """Size of the files in a folder, and in those below."""
    size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it is gone
                size += os.lstat(os.path.join(where, name)).st_size
    return size


def end(init: int) -> None:
    """Kills the init, whatever it leaves behind, and waits until nothing is left.

    Behind walls the kernel ends every process with the init. Elsewhere they fall to this process one after another, and
    are stopped before they are killed, so that none can start others meanwhile.
    """
    kill(init, signal.SIGKILL)
    while True:
        left = below(os.getpid())
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in left:
                kill(process, number)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def kill(process: int, number: int) -> None:
    """Sends a signal, if the process is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)
