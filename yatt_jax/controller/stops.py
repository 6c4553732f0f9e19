"""Being told to stop: a signal, or the end of the time that a run may take."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from yatt_jax.controller.hosts import Hosts


class StopRequested(Exception):
    """The run was told to stop; raised in every process at the same point."""


class Stops:
    """Listens for Ctrl-C and SIGTERM, which is also how schedulers and clouds announce that they take a machine away.

    Args:
      hosts: this process among those of the job; one that is told tells all.
      minutes: that the run may take; 0: any.
    """

    def __init__(self, hosts: Hosts, minutes: float):
        self._hosts, self._minutes = hosts, minutes
        self._begun = time.monotonic()
        self._told = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            with contextlib.suppress(TypeError):  # a handler that was not set from Python
                signal.signal(number, handler)

    def check(self) -> None:
        """Raises where any process has been told to stop. All processes must come here together.

        Raises:
          StopRequested: with the reason.
        """
        told = self._told
        if not told and self._minutes and time.monotonic() - self._begun > 60 * self._minutes:
            told = f"config.max_minutes = {self._minutes:g} have passed"
        said = [text for text in self._hosts.gather("whether to stop", told) if text]
        if said:
            raise StopRequested(said[0])

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        if self._told and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._told = f"{name} in process {self._hosts.process} on {self._hosts.host}"
        more = "; once more to end without saving" if number == signal.SIGINT else ""
        print(f"{name}: this phase ends, then the run is saved and stops{more}", file=sys.stderr, flush=True)
