"""Reads a run directory back, whatever state it is in: running, killed, half-written, or of several processes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from yatt_jax.report.rundir import RunDirError, log_files, log_name, read_log
from yatt_jax.report.samples import Record
from yatt_jax.report.text import listed

Points: TypeAlias = list[tuple[int, float | None]]

TIMELINE_BYTES = 64 << 20  # read of the timelines of all processes but the first; of long ones the end
_LEAST_BYTES = 256 << 10  # of each of them


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of time of one process.

    Attributes:
      name: path of the phase, "rollout" or "rollout/prefill".
      start: seconds since 1970, by the process's own clock.
      end: the same; of a phase that never ended, the last moment its process wrote before it stopped or started anew.
      state: "end", "error" or "open".
    """

    process: int
    step: int
    name: str
    start: float
    end: float
    state: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process ran, in its own words; the last ones, if it started several times."""

    host: str
    devices: tuple[str, ...]
    versions: Mapping[str, str]
    processes: int


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run directory holds.

    Attributes:
      name: the folder's name.
      facts: config.json without the config.
      config: the resolved config.
      steps: metrics by step, ascending; None stands for "no data".
      held_out: completions of the first and the last evaluation, of every process, in the order of sample ids.
      last: training completions of the last step that has any; the same.
      phases: of every process, in the order they started by its own clock.
      since: the first step of which every timeline was read: of many long ones only the end is.
      places: of the processes that said where they run.
      notes: what is amiss with the files.
    """

    path: Path
    name: str
    facts: dict[str, Any]
    config: dict[str, Any]
    steps: dict[int, dict[str, float | None]]
    held_out: list[Record]
    last: list[Record]
    phases: list[Phase]
    since: int = 0
    places: dict[int, Place] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def names(self) -> list[str]:
        """Names of all metrics, in the order they first appear."""
        return list(dict.fromkeys(name for metrics in self.steps.values() for name in metrics))

    def points(self, name: str) -> Points:
        """A metric over the steps that have it."""
        return [(step, metrics[name]) for step, metrics in self.steps.items() if name in metrics]

    def values(self, name: str) -> list[float]:
        """A metric's values, without "no data"."""
        return [value for _, value in self.points(name) if value is not None]

    @property
    def processes(self) -> list[int]:
        """Those whose timeline is here."""
        return sorted({phase.process for phase in self.phases})


def read_run(path: Path) -> Run:
    """Reads a run directory.

    Raises:
      RunDirError: there is no such folder, or it is not a run directory.
    """
    if not path.is_dir():
        raise RunDirError(f"{path}: no such folder; name a run directory, the --workdir of a run")
    logs = {log: log_files(path, log) for log in ("metrics", "samples", "timeline")}
    if not any(logs.values()) and not (path / "config.json").exists():
        raise RunDirError(f"{path} is not a run directory: it has no metrics.jsonl")
    facts = _read_facts(path / "config.json")
    config = facts.pop("config", None)
    notes: list[str] = []
    held_out, last = _read_samples([file for _, file in logs["samples"]], notes)
    times = _read_timelines(logs["timeline"], notes)
    return Run(
        path=path,
        name=path.resolve().name,
        facts=facts,
        config=config if isinstance(config, dict) else {},
        # Process 0 writes them; a file of another one is a leftover.
        steps=_read_metrics([file for _, file in logs["metrics"][:1]], notes),
        held_out=held_out,
        last=last,
        phases=times.phases,
        since=times.since,
        places=times.places,
        notes=notes + _amiss(facts, times),
    )


def _read_facts(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(file.read_text(errors="replace"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _lines(file: Path, notes: list[str], last: int | None = None) -> Iterator[dict[str, Any]]:
    """The lines of a log, as far as it can be read."""
    try:
        yield from read_log(file, last)
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error.strerror or error}): what it holds is missing here.")


def _read_metrics(files: Iterable[Path], notes: list[str]) -> dict[int, dict[str, float | None]]:
    """Several lines of a step (training, evaluation) become one."""
    steps: dict[int, dict[str, float | None]] = defaultdict(dict)
    for file in files:
        for record in _lines(file, notes):
            for name, value in record.items():
                if name == "step" or isinstance(value, bool) or not isinstance(value, int | float | None):
                    continue
                known = value is not None and math.isfinite(value)
                steps[record["step"]][name] = value if known else None
    return dict(sorted(steps.items()))


def _read_samples(files: Iterable[Path], notes: list[str]) -> tuple[list[Record], list[Record]]:
    """Keeps what the page shows, and no more: the log may be larger than memory."""
    first: list[Record] = []
    final: list[Record] = []
    last: list[Record] = []
    for file in files:
        for record in _lines(file, notes):
            if not isinstance(record.get("completion"), str):
                continue
            if record.get("split") == "eval":
                first = _extreme(first, record, lowest=True)
                final = _extreme(final, record, lowest=False)
            else:
                last = _extreme(last, record, lowest=False)
    same = bool(first and final) and first[0]["step"] == final[0]["step"]
    for records in (first, final, last):
        records.sort(key=_sample_id)  # not by process: the page of a run does not depend on how many there were
    return (first if same else first + final), last


def _sample_id(record: Record) -> float:
    value = record.get("sample_id")
    return value if isinstance(value, int) else math.inf


def _extreme(kept: list[Record], record: Record, lowest: bool) -> list[Record]:
    """The records of the lowest, or the highest, step so far."""
    if kept and record["step"] == kept[0]["step"]:
        kept.append(record)
        return kept
    further = not kept or (record["step"] < kept[0]["step"]) == lowest
    return [record] if further else kept


@dataclasses.dataclass
class _Times:
    """What the timelines say."""

    phases: list[Phase] = dataclasses.field(default_factory=list)
    places: dict[int, Place] = dataclasses.field(default_factory=dict)
    since: int = 0


def _read_timelines(files: Sequence[tuple[int, Path]], notes: list[str]) -> _Times:
    """All of the first process's timeline, and of the others what the budget allows."""
    times = _Times()
    budget = max(TIMELINE_BYTES // max(len(files) - 1, 1), _LEAST_BYTES)
    for i, (process, file) in enumerate(files):
        beginning: Iterable[dict[str, Any]] = ()
        records = _lines(file, notes, None if i == 0 else budget)
        if i and _size(file) > budget:
            beginning = [r for r in itertools.islice(_lines(file, notes), 16) if _is_place(r)]
            start = next(records, None)
            if start is not None:  # its first step may have begun before
                cut = start["step"]
                times.since = max(times.since, cut + 1)
                records = itertools.dropwhile(lambda record, cut=cut: record["step"] == cut, records)
        _read_phases(process, itertools.chain(beginning, records), times)
    times.phases.sort(key=lambda phase: (phase.start, phase.name))
    return times


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _is_place(record: Mapping[str, Any]) -> bool:
    return record.get("event") == "process" and record.get("phase") is None


def _read_phases(process: int, records: Iterable[dict[str, Any]], times: _Times) -> None:
    """Adds one process's phases and place.

    What never ended was cut short: by the next start of the process, which its introduction tells, or, where it makes
    none, by the next outer phase.
    """
    started: dict[tuple[int, str], list[tuple[int, float]]] = defaultdict(list)
    starts: list[tuple[int, float]] = []  # of the process: place in the file, and the last moment before
    outer: list[tuple[int, float]] = []
    latest = 0.0
    for at, record in enumerate(records):
        name, moment, event = record.get("phase"), record.get("time"), record.get("event")
        if not isinstance(moment, int | float):
            continue
        if _is_place(record):
            times.places[process] = _place(record)
            starts.append((at, latest))
            latest = moment  # the clock may be another one now
        if not isinstance(name, str):
            continue
        key = (record["step"], name)
        if event == "start":
            started[key].append((at, moment))
            if "/" not in name:
                outer.append((at, latest))
        elif event in ("end", "error") and started[key]:
            start = started[key].pop()[1]
            times.phases.append(Phase(process, record["step"], name, start, moment, event))
        latest = max(latest, moment)
    for (step, name), left in started.items():
        for at, start in left:
            end = next((moment for place, moment in starts or outer if place > at), latest)
            times.phases.append(Phase(process, step, name, start, max(start, end), "open"))


def _place(record: Mapping[str, Any]) -> Place:
    devices, versions, processes = record.get("devices"), record.get("versions"), record.get("processes")
    return Place(
        host=str(record.get("host") or ""),
        devices=tuple(map(str, devices)) if isinstance(devices, list) else (),
        versions={str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
        processes=processes if isinstance(processes, int) else 1,
    )


def _amiss(facts: Mapping[str, Any], times: _Times) -> list[str]:
    """What the timelines lack, and where processes differ that must not."""
    here = {phase.process for phase in times.phases} | set(times.places)
    devices = facts.get("devices")
    said = devices.get("processes") if isinstance(devices, dict) else None
    if not isinstance(said, int):
        said = max((place.processes for place in times.places.values()), default=0)
    notes = []
    if absent := set(range(said)) - here:
        file = log_name("timeline", min(absent))
        notes.append(
            f"No timeline of {listed('process', absent)} (of {said}): it never got that far, or its --workdir is on "
            f"another file system. Copy its files ({file}, ...) here and make this page again."
        )
    lasts = {phase.process: phase.step for phase in sorted(times.phases, key=lambda phase: phase.step)}
    furthest = max(lasts.values(), default=0)
    # While a run is on, some are a step ahead of others.
    if behind := {p: step for p, step in lasts.items() if p < said and step < furthest - 1}:
        notes.append(
            f"{listed('Process', behind)} wrote nothing after {listed('step', behind.values())}; "
            f"others went on to step {furthest}."
        )
    versions: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for process, place in times.places.items():
        for package, version in place.versions.items():
            versions[package][version].append(process)
    for package, found in versions.items():
        if len(found) > 1:
            each = "; ".join(f"{version} on {listed('process', processes)}" for version, processes in found.items())
            notes.append(f"Processes run different versions of {package}: {each}.")
    return notes
