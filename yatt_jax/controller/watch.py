"""Signs of life: how the processes of a job learn that one of them is lost, and stop.

Every process says twice in ``timeout_s / 10`` that it lives, through jax's coordination service. Process 0, which holds
the service, looks who has gone silent and calls the job off with a verdict; a process that fails publishes a verdict of
its own. Everybody reads it, says what happened where, and exits. Whoever cannot reach process 0 any more exits as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import jax

from yatt_jax.ops.options import Positive, check

PREFIX = "yatt_jax"
_VERDICT = f"{PREFIX}/verdict"
_SUSPICION = f"{PREFIX}/suspicion"


@dataclasses.dataclass(frozen=True)
class ControllerConfig:
    """How processes look after each other.

    Attributes:
      timeout_s: when a process dies, hangs or raises, all others have ended after so many seconds.
      straggler_s: longest wait, at an agreement, for a process that is alive; beyond it the run stops. At the start
        the processes wait for each other as long, but no more than five minutes.
    """

    timeout_s: Positive = 60.0
    straggler_s: Positive = 1800.0

    def __post_init__(self) -> None:
        check(self, (self.timeout_s >= 2, f"timeout_s = {self.timeout_s}: must be at least 2"))

    @property
    def beat_s(self) -> float:
        """Seconds between signs of life."""
        return min(2.0, self.timeout_s / 20)

    @property
    def silence_s(self) -> float:
        """Silence after which a process is lost; the rest of ``timeout_s`` is for telling the others."""
        return 0.6 * self.timeout_s

    @property
    def suspect_silence_s(self) -> float:
        """The same, once a process has seen a connection break."""
        return min(self.silence_s, 6 * self.beat_s)


@dataclasses.dataclass(frozen=True)
class Member:
    """What a process last said about itself."""

    process: int
    host: str = "unknown"
    phase: str = "start"
    step: int = 0
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.process} (host {self.host}, phase {self.phase}, step {self.step})"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why the job stops: the first one that is published counts."""

    member: Member
    kind: Literal["raised", "lost"]
    text: str
    status: int = 1

    def to_json(self) -> str:
        """As text for the coordination service."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Verdict:
        """The inverse of ``to_json``."""
        raw = json.loads(text)
        return Verdict(**raw | {"member": Member(**raw["member"])})

    def message(self, reader: Member) -> str:
        """What ``reader`` prints before it exits."""
        what = "failed" if self.kind == "raised" else "was lost"
        return f"stopped: {self.member} {what}; this is {reader}\n{self.text}"


class Watch:
    """Shows signs of life and looks for those of the others.

    One thread talks to the coordination service: it says that this process lives, and reads whether the job has been
    called off; in process 0 it also looks who has gone silent. Another thread only watches the clock of the first:
    requests to a service whose process is stopped never return.

    Args:
      me: what this process says about itself.
      count: number of processes.
      client: of the coordination service.
      config: time limits.
    """

    def __init__(self, me: Callable[[], Member], count: int, client: Any, config: ControllerConfig):
        self._me, self._count, self._client, self._config = me, count, client, config
        self._stopped = threading.Event()
        self._contact = time.monotonic()
        self._leader = Member(0)
        self._seen: dict[int, tuple[Member, float]] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts both threads."""
        self._contact = time.monotonic()
        for target in (self._beat, self._guard):
            threading.Thread(target=target, daemon=True, name=f"yatt_jax {target.__name__}").start()

    def stop(self) -> None:
        """Ends the watch, in all processes at about the same time."""
        self._stopped.set()

    def publish(self, verdict: Verdict) -> None:
        """Calls the job off; where it has been called off already, ends this process for that reason."""
        try:
            self._client.key_value_set(_VERDICT, verdict.to_json())
        except jax.errors.JaxRuntimeError:
            self._obey()

    def await_verdict(self) -> None:
        """Waits as long as it takes to find out whether another process is lost; does not return if one is."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(_SUSPICION, str(self._me().process), allow_overwrite=True)
        end = time.monotonic() + self._config.suspect_silence_s + 4 * self._config.beat_s
        while time.monotonic() < end:
            time.sleep(self._config.beat_s / 2)

    def lost_service(self, reason: str) -> None:
        """Process 0 holds the service: without it this process cannot go on."""
        if not self._stopped.is_set():
            self._end(Verdict(self._leader, "lost", reason))

    def _beat(self) -> None:
        beat, failures = 0, 0
        while not self._stopped.wait(0.1 if failures else self._config.beat_s):
            beat += 1
            me = dataclasses.replace(self._me(), beat=beat)
            try:
                self._client.key_value_set(
                    f"{PREFIX}/beat/{me.process}", json.dumps(dataclasses.asdict(me)), allow_overwrite=True
                )
                self._obey()
                if me.process == 0:
                    self._look()
                else:
                    self._leader = describe(self._client, 0)
                self._contact, failures = time.monotonic(), 0
            except jax.errors.JaxRuntimeError as error:
                failures += 1
                if failures >= 3 and not self._stopped.is_set():
                    self.lost_service(f"it does not answer any more ({str(error).splitlines()[0][:200]})")

    def _guard(self) -> None:
        while not self._stopped.wait(self._config.beat_s):
            silent = time.monotonic() - self._contact
            if silent > self._config.silence_s + 2 * self._config.beat_s and not self._stopped.is_set():
                self.lost_service(f"it has not answered for {silent:.0f} s")

    def _obey(self) -> None:
        """Ends this process if the job has been called off."""
        try:
            text = self._client.key_value_try_get(_VERDICT)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return
            raise
        self._end(Verdict.from_json(text))

    def _look(self) -> None:
        """Process 0: who has gone silent?"""
        now = time.monotonic()
        for _, text in self._client.key_value_dir_get(f"{PREFIX}/beat/"):
            member = Member(**json.loads(text))
            known = self._seen.get(member.process)
            if known is None or known[0].beat != member.beat:
                self._seen[member.process] = (member, now)
        limit = self._config.silence_s
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_try_get(_SUSPICION)
            limit = self._config.suspect_silence_s
        for process in range(1, self._count):
            member, last = self._seen.setdefault(process, (Member(process), now))
            if now - last > limit:
                silence = f"it has shown no sign of life for {now - last:.0f} s"
                verdict = Verdict(member, "lost", f"{silence}: it was killed or stopped, or its host is gone")
                self.publish(verdict)
                self._end(verdict)

    def _end(self, verdict: Verdict) -> NoReturn:
        with self._lock:  # one message, whichever thread is first
            self.let_others_read()
            say(verdict.message(self._me()))
            end(verdict.status)

    def let_others_read(self) -> None:
        """Process 0 holds the service, and with it the verdict: it goes last."""
        if self._me().process == 0:
            time.sleep(4 * self._config.beat_s)


def describe(client: Any, process: int) -> Member:
    """What a process last said about itself."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        return Member(**json.loads(client.key_value_try_get(f"{PREFIX}/beat/{process}")))
    return Member(process)


def say(text: str) -> None:
    """To standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def end(status: int) -> NoReturn:
    """Ends the process at once: orderly ways out wait for processes that may be gone."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
