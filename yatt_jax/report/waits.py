"""How long each process, and so its devices, waited for the others, and for whom.

Durations come from a process's own clock only. Clocks of different machines are compared by the ends of waits: all
processes leave an agreement at the same moment.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from yatt_jax.report.read import Phase, Run

PAUSE_S = 60.0  # between two phases; a longer one is the time between a stop and a resume
BETWEEN = "between phases"


@dataclasses.dataclass(frozen=True)
class Waited:
    """One process's waiting.

    Attributes:
      devices: how many it has.
      work: seconds it was at work, waits included.
      phases: seconds it waited, by outer phase.
      held_up: seconds that the others, on average, waited for this process after they had all come but it.
    """

    process: int
    devices: int
    work: float
    phases: Mapping[str, float]
    held_up: float

    @property
    def total(self) -> float:
        """Seconds it waited."""
        return sum(self.phases.values())

    @property
    def share(self) -> float:
        """Of its time."""
        return self.total / self.work if self.work else 0.0


@dataclasses.dataclass(frozen=True)
class Waits:
    """Waiting of all processes.

    Attributes:
      first: the first step that counts.
      last: the last one.
      each: by process, ascending.
    """

    first: int
    last: int
    each: Sequence[Waited]

    @property
    def share(self) -> float:
        """Of the time of all devices."""
        time = sum(one.devices * one.work for one in self.each)
        return sum(one.devices * one.total for one in self.each) / time if time else 0.0

    @property
    def work(self) -> float:
        """Seconds at work, a device."""
        return self._mean([one.work for one in self.each])

    @property
    def phases(self) -> dict[str, float]:
        """Seconds waited by outer phase, a device."""
        names = dict.fromkeys(name for one in self.each for name in one.phases)
        return {name: self._mean([one.phases.get(name, 0.0) for one in self.each]) for name in names}

    def slowest(self) -> tuple[Waited, float] | None:
        """The process that the others waited for most, and its part in all the waiting for a last one."""
        total = sum(one.held_up for one in self.each)
        if not total:
            return None
        worst = max(self.each, key=lambda one: one.held_up)
        return worst, worst.held_up / total

    def _mean(self, values: Sequence[float]) -> float:
        devices = sum(one.devices for one in self.each)
        return sum(one.devices * value for one, value in zip(self.each, values, strict=True)) / devices


def is_wait(name: str) -> bool:
    """Whether a phase is waiting for the others; one within another counts once."""
    *outer, last = name.split("/")
    return last == "wait" and "wait" not in outer


def during(name: str) -> str:
    """The outer phase that a wait belongs to."""
    outer, _, inner = name.partition("/")
    return outer if inner else BETWEEN


def measure(run: Run) -> Waits | None:
    """Waiting over the steps that every timeline covers; None without a phase in them."""
    counted = [phase for phase in run.phases if phase.step >= run.since]
    if not counted:
        return None
    of_process: dict[int, list[Phase]] = defaultdict(list)
    for phase in counted:
        of_process[phase.process].append(phase)
    held_up: dict[int, float] = defaultdict(float)
    for meeting in _meetings(counted):
        waited = {process: wait.end - wait.start for process, wait in meeting.items()}
        last = min(waited, key=lambda process: (waited[process], process))
        others = len(waited) - 1
        held_up[last] += sum(seconds - waited[last] for seconds in waited.values()) / others
    devices = _devices(run)
    each = [
        Waited(process, devices[process], seconds_at_work(phases), _waited(phases), held_up[process])
        for process, phases in sorted(of_process.items())
    ]
    steps = [phase.step for phase in counted]
    return Waits(min(steps), max(steps), each)


def stretches(phases: Iterable[Phase]) -> list[tuple[float, float]]:
    """Start and end of the times at work; pauses between a stop and a resume part them.

    Args:
      phases: by one clock.
    """
    found: list[tuple[float, float]] = []
    for phase in sorted(phases, key=lambda phase: phase.start):
        if found and phase.start - found[-1][1] <= PAUSE_S:
            found[-1] = (found[-1][0], max(found[-1][1], phase.end))
        else:
            found.append((phase.start, phase.end))
    return found


def seconds_at_work(phases: Iterable[Phase]) -> float:
    """Seconds of the phases of one process and between them, without pauses."""
    return sum(end - start for start, end in stretches(phases))


def clocks(phases: Sequence[Phase], steps: Sequence[int]) -> dict[int, float]:
    """Seconds that each process's clock is ahead of the first process's.

    The median over the waits that both left together; over all steps where the named ones have none. A process without
    such a wait is taken to begin its steps when the first one does.

    Args:
      phases: of all processes.
      steps: those whose waits count first.
    """
    processes = sorted({phase.process for phase in phases})
    wanted = set(steps)
    recent = [phase for phase in phases if phase.step in wanted]
    near, far, begins = (_behind(processes[0], moments) for moments in (_ends(recent), _ends(phases), _begins(recent)))
    ahead: dict[int, float] = {}
    for process in processes:
        found = near.get(process) or far.get(process) or begins.get(process)
        ahead[process] = statistics.median(found) if found else 0.0
    return ahead


def _devices(run: Run) -> dict[int, int]:
    """Devices of each process; one that did not say has as many as most."""
    said = {process: len(place.devices) for process, place in run.places.items() if place.devices}
    usual = statistics.mode(said.values()) if said else 1
    return {process: said.get(process, usual) for process in run.processes}


def _waited(phases: Iterable[Phase]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for phase in phases:
        if is_wait(phase.name):
            seconds[during(phase.name)] += phase.end - phase.start
    return dict(seconds)


def _meetings(phases: Iterable[Phase]) -> Iterator[dict[int, Phase]]:
    """Waits that ended together, by process: the same in turn of a step and a name.

    Where processes were in a different number of them, one was cut short, and which belong together is not known.
    """
    found: dict[tuple[int, str], dict[int, list[Phase]]] = defaultdict(lambda: defaultdict(list))
    for phase in phases:
        if phase.state == "end" and is_wait(phase.name):
            found[phase.step, phase.name][phase.process].append(phase)
    for waits in found.values():
        if len(waits) > 1 and len({len(own) for own in waits.values()}) == 1:
            for own in zip(*waits.values(), strict=True):
                yield {wait.process: wait for wait in own}


def _ends(phases: Iterable[Phase]) -> list[dict[int, float]]:
    return [{process: wait.end for process, wait in meeting.items()} for meeting in _meetings(phases)]


def _begins(phases: Iterable[Phase]) -> list[dict[int, float]]:
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for phase in phases:
        begin = found[phase.step].get(phase.process, phase.start)
        found[phase.step][phase.process] = min(begin, phase.start)
    return list(found.values())


def _behind(first: int, moments: Iterable[Mapping[int, float]]) -> dict[int, list[float]]:
    """Seconds from the first process's moment to each one's, wherever both have one."""
    found: dict[int, list[float]] = defaultdict(list)
    for at in moments:
        if first in at:
            for process, moment in at.items():
                found[process].append(moment - at[first])
    return found
