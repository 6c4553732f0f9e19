"""Run directories of several processes whose waits are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from yatt_jax.report.rundir import RunDir

TRAIN_S = 4.0


def put(run: RunDir, step: int, phase: str, start: float, end: float | None, event: str = "end") -> None:
    run.append("timeline", {"step": step, "phase": phase, "event": "start", "time": start})
    if end is not None:
        run.append("timeline", {"step": step, "phase": phase, "event": event, "time": end})


def make_run(
    folder: Path,
    rollout: Sequence[float],
    *,
    train_waits: Mapping[int, float] | None = None,
    devices: Sequence[int] = (),
    skew: Mapping[int, float] | None = None,
    steps: int = 3,
    introduce: bool = True,
) -> Path:
    """A run whose process p samples for ``rollout[p]`` seconds and waits for the slowest, then all train 4 s.

    Args:
      folder: the run directory.
      rollout: seconds of each process.
      train_waits: seconds that a process waits at the end of training.
      devices: of each process; 4 where nothing is said.
      skew: seconds that a clock is ahead.
      steps: how many.
      introduce: whether processes say where they run.
    """
    slowest = max(rollout)
    for process, own in enumerate(rollout):
        run = RunDir.open(folder, process, len(rollout))
        ahead = 1000.0 + (skew or {}).get(process, 0.0)
        count = devices[process] if devices else 4
        if introduce:
            place = {"host": f"host-{process // 2}", "devices": [f"cpu {i}" for i in range(count)]}
            about = {"event": "process", "time": ahead, "processes": len(rollout), "versions": {"jax": "0.10.2"}}
            run.append("timeline", {"step": 0, "phase": None, **about, **place})
        for step in range(1, steps + 1):
            start = ahead + (step - 1) * (slowest + TRAIN_S)
            meet = start + slowest
            put(run, step, "rollout/sample", start, start + own)
            put(run, step, "rollout/wait", start + own, meet)
            put(run, step, "rollout", start, meet)
            waited = (train_waits or {}).get(process, 0.0)
            put(run, step, "train/wait", meet + TRAIN_S - waited, meet + TRAIN_S)
            put(run, step, "train", meet, meet + TRAIN_S)
        run.close()
    return folder
