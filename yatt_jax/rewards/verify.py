"""Worker processes that judge mathematical answers and are killed at their time limit.

Checking an answer can take for ever, and library time limits that use signals fail outside the main thread. Here each
check runs in a process of a small reused pool; one that does not answer in time is killed and replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from yatt_jax.rewards.spec import Invalid

_START_S = 120.0  # importing the algebra system on a busy machine


class Verifier:
    """A pool of worker processes; safe to use from several threads.

    Args:
      processes: checks that run at the same time. They start when first needed.
    """

    def __init__(self, processes: int) -> None:
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker() for _ in range(processes)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(processes, "verify")

    def judge(self, tasks: Sequence[tuple[list[str], str]], limit_s: float) -> list[float | Invalid]:
        """Compares answers.

        Args:
          tasks: gold answers (any of them is right) and the text that should end with one.
          limit_s: seconds a task may take.

        Returns:
          1.0 if equal, 0.0 if not; ``Invalid`` for a task that ran into the limit, broke its process, or whose gold
          answer cannot be read.

        Raises:
          RuntimeError: a worker process cannot start; the message has what it wrote.
        """
        return list(self._threads.map(lambda task: self._judge(task, limit_s), tasks))

    def _judge(self, task: tuple[list[str], str], limit_s: float) -> float | Invalid:
        worker = self._idle.get()
        try:
            return worker.ask(task[0], task[1], limit_s)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()


class _Worker:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def ask(self, golds: list[str], text: str, limit_s: float) -> float | Invalid:
        process = self._process if self._process and self._process.poll() is None else self._start()
        task = json.dumps({"golds": golds, "text": text, "limit_s": limit_s}) + "\n"
        try:
            answer = self._exchange(process, task.encode(), limit_s)
        except TimeoutError:
            self.kill()
            return Invalid(f"stopped at the time limit of {limit_s:g} s")
        except (EOFError, OSError):
            self.kill()
            return Invalid("the verifying process died (out of memory, or too deep an expression)")
        return Invalid(answer["invalid"]) if "invalid" in answer else float(answer["score"])

    def _start(self) -> subprocess.Popen[bytes]:
        self.kill()
        script = Path(__file__).with_name("verify_worker.py")
        # -P: the script's folder is not searched for modules, where it would shadow others'.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is the parent's to handle
        )
        try:
            self._exchange(self._process, b"", _START_S)
        except (TimeoutError, EOFError, OSError) as error:
            code = self._process.poll()
            self.kill()
            raise RuntimeError(
                f"the math verifier did not start ({type(error).__name__}, exit status {code}); "
                f"is math-verify installed? Try: {sys.executable} -c 'import math_verify'"
            ) from error
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], task: bytes, limit_s: float) -> dict[str, str]:
        """Sends a task and waits for a line."""
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + limit_s
        source, target = process.stdout.fileno(), process.stdin.fileno()
        os.set_blocking(target, False)
        poller = select.poll()
        poller.register(source, select.POLLIN)
        if task:
            poller.register(target, select.POLLOUT)
        while b"\n" not in self._buffer:
            ready = dict(poller.poll(max(deadline - time.monotonic(), 0) * 1000))
            if not ready:
                raise TimeoutError
            if target in ready:
                task = task[os.write(target, task[:65536]) :]
                if not task:
                    poller.unregister(target)
            if source in ready:
                received = os.read(source, 65536)
                if not received:
                    raise EOFError
                self._buffer += received
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def kill(self) -> None:
        """Ends the process, if there is one."""
        process, self._process, self._buffer = self._process, None, b""
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


@functools.cache
def shared_verifier(processes: int) -> Verifier:
    """The pool of this many processes, kept for the life of the program and closed at its end."""
    verifier = Verifier(processes)
    atexit.register(verifier.close)
    return verifier
