"""Reads a run directory back, whatever state it is in: running, killed, half-written, or of several processes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from yatt_jax.report.rundir import RunDirError, log_files, read_log
from yatt_jax.report.samples import Record

Points: TypeAlias = list[tuple[int, float | None]]


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of time of one process.

    Attributes:
      name: path of the phase, "rollout" or "rollout/prefill".
      start: seconds since 1970.
      end: the same; of a phase that never ended, the last moment its process wrote.
      state: "end", "error" or "open".
    """

    process: int
    step: int
    name: str
    start: float
    end: float
    state: str


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run directory holds.

    Attributes:
      name: the folder's name.
      facts: config.json without the config.
      config: the resolved config.
      steps: metrics by step, ascending; None stands for "no data".
      held_out: completions of the first and the last evaluation.
      last: training completions of the last step that has any.
      phases: of every process, in the order they started.
    """

    path: Path
    name: str
    facts: dict[str, Any]
    config: dict[str, Any]
    steps: dict[int, dict[str, float | None]]
    held_out: list[Record]
    last: list[Record]
    phases: list[Phase]

    def names(self) -> list[str]:
        """Names of all metrics, in the order they first appear."""
        return list(dict.fromkeys(name for metrics in self.steps.values() for name in metrics))

    def points(self, name: str) -> Points:
        """A metric over the steps that have it."""
        return [(step, metrics[name]) for step, metrics in self.steps.items() if name in metrics]

    def values(self, name: str) -> list[float]:
        """A metric's values, without "no data"."""
        return [value for _, value in self.points(name) if value is not None]


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
    held_out, last = _read_samples([file for _, file in logs["samples"]])
    return Run(
        path=path,
        name=path.resolve().name,
        facts=facts,
        config=config if isinstance(config, dict) else {},
        steps=_read_metrics([file for _, file in logs["metrics"]]),
        held_out=held_out,
        last=last,
        phases=_read_phases(logs["timeline"]),
    )


def _read_facts(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(file.read_text(errors="replace"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _read_metrics(files: Iterable[Path]) -> dict[int, dict[str, float | None]]:
    """Several lines of a step (training, evaluation) become one."""
    steps: dict[int, dict[str, float | None]] = defaultdict(dict)
    for file in files:
        for record in read_log(file):
            for name, value in record.items():
                if name == "step" or isinstance(value, bool) or not isinstance(value, int | float | None):
                    continue
                known = value is not None and math.isfinite(value)
                steps[record["step"]][name] = value if known else None
    return dict(sorted(steps.items()))


def _read_samples(files: Iterable[Path]) -> tuple[list[Record], list[Record]]:
    """Keeps what the page shows, and no more: the log may be larger than memory."""
    first: list[Record] = []
    final: list[Record] = []
    last: list[Record] = []
    for file in files:
        for record in read_log(file):
            if not isinstance(record.get("completion"), str):
                continue
            if record.get("split") == "eval":
                first = _extreme(first, record, lowest=True)
                final = _extreme(final, record, lowest=False)
            else:
                last = _extreme(last, record, lowest=False)
    same = bool(first and final) and first[0]["step"] == final[0]["step"]
    return (first if same else first + final), last


def _extreme(kept: list[Record], record: Record, lowest: bool) -> list[Record]:
    """The records of the lowest, or the highest, step so far."""
    if kept and record["step"] == kept[0]["step"]:
        kept.append(record)
        return kept
    further = not kept or (record["step"] < kept[0]["step"]) == lowest
    return [record] if further else kept


def _read_phases(files: Sequence[tuple[int, Path]]) -> list[Phase]:
    phases: list[Phase] = []
    for process, file in files:
        started: dict[tuple[int, str], list[float]] = defaultdict(list)
        outer: list[float] = []
        latest = 0.0
        for record in read_log(file):
            name, moment, event = record.get("phase"), record.get("time"), record.get("event")
            if not isinstance(name, str) or not isinstance(moment, int | float):
                continue
            latest = max(latest, moment)
            key = (record["step"], name)
            if event == "start":
                started[key].append(moment)
                outer += [moment] if "/" not in name else []
            elif event in ("end", "error") and started[key]:
                phases.append(Phase(process, record["step"], name, started[key].pop(), moment, event))
        for (step, name), moments in started.items():
            for start in moments:  # never ended: the process was killed, or is still at it
                end = min((moment for moment in outer if moment > start), default=latest)
                phases.append(Phase(process, step, name, start, end, "open"))
    return sorted(phases, key=lambda phase: (phase.start, phase.name))
