"""The processes of a job: joining them, small agreements, and stopping all when one is lost.

Every process is an equal controller. They meet in device collectives, and in the agreements here: JSON values of a few
kilobytes over jax's coordination service. Each process shows signs of life there; when one dies, hangs or raises, every
other one prints who, where and in which phase, and exits.

The only module that uses private jax API: the client of the coordination service has no public one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeAlias

import jax
from jax._src import distributed as _distributed
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from yatt_jax.controller.watch import PREFIX, ControllerConfig, Member, Verdict, Watch, describe, end, say
from yatt_jax.errors import InputError, RunFailure, told


class Hosts:
    """This process among the processes of a job.

    Args:
      process: its number.
      count: number of processes.
      config: time limits.
      client: of the coordination service; None for a job of one process.

    Attributes:
      waiting: wraps each wait for the others; the job makes it a phase of its timeline.
    """

    def __init__(
        self,
        process: int = 0,
        count: int = 1,
        config: ControllerConfig | None = None,
        client: Any = None,
    ):
        self.process, self.count = process, count
        self.host = socket.gethostname()
        self.waiting: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        self._config = config or ControllerConfig()
        self._client = client
        self._rounds: dict[str, int] = {}
        self._me = Member(process, self.host)
        self.watch = Watch(lambda: self._me, count, client, self._config) if client is not None else None

    def __enter__(self) -> Hosts:
        if self.watch is not None:
            self.watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.watch is None:
            return
        if error is not None:
            self.fail(error)
        self.barrier("the end of the run")
        self.watch.stop()
        jax.distributed.shutdown()

    @property
    def is_main(self) -> bool:
        """Whether this process does what a job does once."""
        return self.process == 0

    def note(self, phase: str, step: int) -> None:
        """Says what this process is doing, for the messages of the others."""
        self._me = dataclasses.replace(self._me, phase=phase, step=step)

    @property
    def member(self) -> Member:
        """This process as others see it."""
        return self._me

    def gather(self, name: str, value: Any, among: Sequence[int] | None = None) -> list[Any]:
        """Exchanges a small value with the other processes.

        Args:
          name: what is agreed on, for messages; every process must come to the same agreements in the same order.
          value: anything JSON can say.
          among: processes that take part, ascending; all by default. It must include this one.

        Returns:
          The values of all processes that take part, in their order.

        Raises:
          RunFailure: processes came to different agreements, or one that is alive did not come in ``straggler_s``.
        """
        members = list(range(self.count)) if among is None else list(among)
        if len(members) == 1:
            return [json.loads(json.dumps(value))]
        scope = "all" if among is None else "-".join(map(str, (members[0], members[-1], len(members))))
        number = self._rounds[scope] = self._rounds.get(scope, 0) + 1
        key = f"{PREFIX}/agree/{scope}/{number}"
        self._client.key_value_set(f"{key}/value/{self.process}", json.dumps([name, value]))
        # The last to come opens the gate: three small requests a process, whatever their number.
        if self._client.key_value_increment(f"{key}/arrived", 1) == len(members):
            self._client.key_value_set(f"{key}/open", "")
        with self.waiting():
            self._await(key, name, members)
        found = dict(self._values(key))
        if self.process == members[0] and number > 1:  # all have come here, so all have read what was before
            self._client.key_value_delete(f"{PREFIX}/agree/{scope}/{number - 1}/")
        others = {other for other, _ in found.values()} - {name}
        if others:
            raise RunFailure(f"processes came to different agreements: {self._me} to {name!r}, another to {others}")
        return [found[member][1] for member in members]

    def barrier(self, name: str) -> None:
        """Waits for all processes.

        Raises:
          RunFailure: as ``gather``.
        """
        self.gather(name, None)

    def fail(self, error: BaseException) -> NoReturn:
        """Tells the other processes of an error and ends this one.

        An error of a collective is most often another process' death: then that is what is reported.
        """
        status = error.code if isinstance(error, SystemExit) else getattr(error, "status", 1)
        status = status if isinstance(status, int) else 1
        if self.watch is not None:
            if isinstance(error, jax.errors.JaxRuntimeError):
                self.watch.await_verdict()
            expected = isinstance(error, InputError | RunFailure)
            text = told(error) if expected else "".join(traceback.format_exception(error))
            self.watch.publish(Verdict(self._me, "raised", text.strip(), status))
            self.watch.let_others_read()
        say(
            f"{'error' if status == 2 else 'stopped'}: {told(error)}"
            if str(error)
            else f"stopped: {type(error).__name__}"
        )
        if not isinstance(error, InputError | RunFailure):
            traceback.print_exception(error)
        end(status)

    def _await(self, key: str, name: str, members: Sequence[int]) -> None:
        limit = self._config.straggler_s
        try:
            self._client.blocking_key_value_get(f"{key}/open", int(limit * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            came = {process for process, _ in self._values(key)}
            late = [str(describe(self._client, m)) for m in members if m not in came]
            raise RunFailure(
                f"{self._me} waited {limit:.0f} s at the agreement on {name!r} for {', '.join(late) or 'nobody'}; "
                "config.controller.straggler_s is the limit"
            ) from None

    def _values(self, key: str) -> list[tuple[int, tuple[str, Any]]]:
        return [(int(k.rpartition("/")[2]), json.loads(v)) for k, v in self._client.key_value_dir_get(f"{key}/value/")]


def join(
    config: ControllerConfig, coordinator: str = "", processes: int = 0, process: int = -1, *, detect: bool = False
) -> Hosts:
    """Joins the processes of a job; call it before anything else touches a device.

    Args:
      config: time limits.
      coordinator: ``HOST:PORT`` of process 0; empty: this process is alone, unless ``detect``.
      processes: number of processes.
      process: number of this one.
      detect: let jax find all three from the cluster it runs in: Slurm, Open MPI, Cloud TPU, Kubernetes.

    Raises:
      InputError: no cluster was found.
      RunFailure: the processes did not come together.
    """
    if not coordinator and not detect:
        return Hosts(config=config)
    explicit = (coordinator, processes, process) if coordinator else (None, None, None)
    # Signals are the job's own affair: see ``yatt_jax.main``.
    jax.config.update("jax_enable_preemption_service", False)
    # Our watch reports better than jax's, which ends the process without a word about phases: let it be first.
    patience = int(max(600, 10 * config.timeout_s))
    name = "get_distributed_runtime_client"
    known = "missed_heartbeat_callback" in (getattr(_jax, name).__doc__ or "")
    with _patched(_jax, name, **({"missed_heartbeat_callback": _ignore} if known else {})):
        try:
            jax.distributed.initialize(
                *explicit,
                heartbeat_timeout_seconds=patience,
                initialization_timeout=math.ceil(min(300, config.straggler_s)),
            )
        except ValueError as error:
            raise InputError(
                f"--distributed: this process was not started in a cluster that jax knows: {error}"
            ) from error
        except RuntimeError as error:  # a host that is slow to start, a port that is taken: it may be tried again
            where = f"--coordinator={coordinator}" if coordinator else "--distributed"
            raise RunFailure(f"{where}: the processes did not come together: {error}") from error
    state = _distributed.global_state
    _collectives_by_address(state.coordinator_address or "")
    hosts = Hosts(state.process_id, state.num_processes, config, state.client)
    if not hosts.is_main and hosts.watch is not None:
        _speak_before_abort(state.coordinator_address or "", hosts.watch.lost_service)
    return hosts


def _ignore(status: Any = None) -> None:
    """Jax's client calls this when it has lost the service; the watch finds out by itself."""


_HANDLERS: list[Any] = []  # what C holds a pointer to must stay


def _speak_before_abort(coordinator: str, lost: Callable[[str], None]) -> None:
    """Says what happened when jax's client aborts this process.

    It does so at once when the process that holds the service dies, before the watch can find out: it cannot call
    ``_ignore``, since the status that it would pass does not convert.
    """
    host, _, port = coordinator.rpartition(":")

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def speak(signal_number: int) -> None:
        del signal_number
        for _ in range(20):  # a process that is being killed closes its sockets one after the other
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
            except OSError as error:
                lost(f"the connection to it broke ({error})")
            time.sleep(0.1)

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).signal(signal.SIGABRT, speak)
        _HANDLERS.append(speak)


@contextlib.contextmanager
def _patched(module: Any, name: str, **more: Any) -> Any:
    """Gives a function of a module further arguments while the block runs."""
    original = getattr(module, name)
    setattr(module, name, functools.partial(original, **more))
    try:
        yield
    finally:
        setattr(module, name, original)


def _collectives_by_address(coordinator: str) -> None:
    """Lets CPU collectives bind to the address by which this process reaches the coordinator.

    By default they bind to what the host's own name resolves to: nothing, perhaps, or an address of another network.
    """
    name, _, port = coordinator.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        family, kind, protocol, _, address = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own = probe.getsockname()[0]
        _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname=own)


# Figures of one process: name -> (total, weight), a mean over processes; or (total, None), a sum over them.
Sums: TypeAlias = dict[str, tuple[float, float | None]]


def totals(parts: Sequence[Sums]) -> dict[str, float]:
    """Adds figures up over processes; NaN where nothing has weight."""
    found = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        total = sum(part[name][0] for part in parts if name in part)
        weights = [part[name][1] for part in parts if name in part]
        if None in weights:
            found[name] = total
        else:
            weight = sum(weight or 0.0 for weight in weights)
            found[name] = total / weight if weight else float("nan")
    return found
