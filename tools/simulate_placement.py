"""Compares placements of sampler and judge on simulated devices: ``python -m tools.simulate_placement [--out DIR]``.

Plays workloads in every mode of placement: taking turns on all devices, every fixed split, devices of their own for
training, the controller of ``yatt_jax.controller.placement``, and an oracle that knows the best split of every step.
Prints a table; with ``--out`` writes it with all figures as JSON, and pictures as SVG. What the world is like, and what
it leaves out, is in ``tools.placement_world``. ``--run DIR`` replays the lengths of a run's responses.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.placement_modes import Run, play
from tools.placement_workloads import Workload, measured_workload, workloads
from tools.placement_world import SAMPLER, Machine
from yatt_jax.controller.placement import Limits
from yatt_jax.report.charts import Line
from yatt_jax.report.picture import curves
from yatt_jax.report.read import Points

COLUMNS = (
    "oracle",
    "adaptive",
    "/ oracle",
    "fixed /",
    "turns /",
    "turns -",
    "moves / 10",
    "whole step",
    "stale 1",
    "2",
    "4",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.simulate_placement", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[8], help="of the job, a multiple of a host's")
    parser.add_argument("--host", type=int, default=8, help="devices of a host")
    parser.add_argument("--rows", type=int, default=128, help="rows of a step for each device")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", help="names of workloads; default: all")
    parser.add_argument("--run", type=Path, help="replay the lengths of this run's responses in their place")
    parser.add_argument("--verdict", type=float, default=512, help="median tokens of verdicts with --run")
    parser.add_argument(
        "--disaggregated", action=argparse.BooleanOptionalAction, default=True, help="also where training is apart"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="write figures and pictures into this folder")
    args = parser.parse_args(argv)
    try:
        machine = Machine(devices=args.host, rows=args.rows)
        chosen = _chosen(args)
        hosts = [_hosts(devices, args.host) for devices in args.devices]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    limits, found = Limits(), []
    print(table_head(), flush=True)
    for count in hosts:
        for workload in chosen:
            how = {"workers": args.workers, "apart": args.disaggregated}
            runs = [play(machine, workload, count, seed, limits, **how) for seed in args.seeds]
            figures = summary(machine, workload, runs)
            print(table_row(figures), flush=True)
            found.append(figures)
            if args.out and count == hosts[0]:
                write_pictures(args.out, workload, runs[0])
    if args.out:
        stem = "-".join(str(part) for part in ("simulated", *args.devices, args.rows))
        about = {"machine": dataclasses.asdict(machine), "limits": dataclasses.asdict(limits), "found": found}
        (args.out / f"{stem}.json").write_text(json.dumps(about, indent=1, default=str) + "\n", "utf-8")
    return 0


def _chosen(args: argparse.Namespace) -> list[Workload]:
    if args.run:
        return [measured_workload(args.run, args.verdict)]
    known = workloads(args.steps)
    unknown = [name for name in args.only or () if name not in known]
    if unknown:
        raise ValueError(f"--only {unknown[0]!r}: no such workload; there are {list(known)}")
    return [known[name] for name in args.only or known]


def _hosts(devices: int, host: int) -> int:
    if host < 3 or devices < host or devices % host:
        raise ValueError(f"--devices {devices}: must be a multiple of --host {host}, which must be at least 3")
    return devices // host


def summary(machine: Machine, workload: Workload, runs: Sequence[Run]) -> dict[str, Any]:
    """Figures of a workload, means over seeds; seconds are those of a step.

    Args:
      machine: that it was played on.
      workload: that was played.
      runs: one for each seed.
    """

    def mean(values: Sequence[float]) -> float:
        return float(statistics.fmean(values))

    errors = [abs(error) for run in runs for host in run.hosts for error in host.errors]
    return {
        "workload": workload.name,
        "devices": machine.devices * len(runs[0].hosts),
        "rows a device": machine.rows,
        "steps": workload.steps,
        "seeds": len(runs),
        "oracle": mean([run.oracle.mean() for run in runs]),
        "adaptive": mean([run.adaptive.mean() for run in runs]),
        "adaptive / oracle": mean([run.adaptive.sum() / run.oracle.sum() for run in runs]),
        "best fixed": str(runs[0].best_fixed),
        "fixed / adaptive": mean([run.fixed[run.best_fixed].sum() / run.adaptive.sum() for run in runs]),
        "colocated / adaptive": mean([run.colocated.sum() / run.adaptive.sum() for run in runs]),
        "less than colocated": mean([1 - run.adaptive.sum() / run.colocated.sum() for run in runs]),
        "moves in ten steps": mean([10 * run.moves_a_step for run in runs]),
        "error of forecasts": mean(errors) if errors else None,
        "whole step": mean([(run.adaptive + run.training).mean() for run in runs]),
        "disaggregated": {
            stale: {"split": split, "whole step": mean([run.disaggregated[stale][1] for run in runs])}
            for stale, (split, _) in runs[0].disaggregated.items()
        },
        "moves": [
            {"step": move.step, "reason": move.reason} for move in runs[0].hosts[0].moves
        ],
    }  # fmt: skip


def table_head() -> str:
    """The line above the rows of the table."""
    return f"{'devices':>7} {'workload':<22}" + "".join(f"{name:>11}" for name in COLUMNS)


def table_row(figures: dict[str, Any]) -> str:
    """A line of the table: seconds of a phase, ratios of phases, seconds of whole steps."""
    apart = [figures["disaggregated"].get(stale, {}).get("whole step", np.nan) for stale in (1, 2, 4)]
    values = [
        f"{figures['oracle']:.1f}",
        f"{figures['adaptive']:.1f}",
        f"{figures['adaptive / oracle']:.3f}",
        f"{figures['fixed / adaptive']:.3f}",
        f"{figures['colocated / adaptive']:.3f}",
        f"{figures['less than colocated']:.1%}",
        f"{figures['moves in ten steps']:.2f}",
        f"{figures['whole step']:.1f}",
        *(f"{seconds:.1f}" for seconds in apart),
    ]
    return f"{figures['devices']:>7} {figures['workload']:<22}" + "".join(f"{value:>11}" for value in values)


def write_pictures(folder: Path, workload: Workload, run: Run) -> None:
    """Writes times and shares by step as SVG files.

    Args:
      folder: made where it is not there.
      workload: that was played.
      run: of one seed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = "placement-" + re.sub(r"\W+", "-", workload.name)
    steps = range(1, workload.steps + 1)

    def line(label: str, values: Sequence[float] | np.ndarray, colour: int) -> Line:
        points: Points = [(step, float(value)) for step, value in zip(steps, values, strict=True)]
        return Line(label, points, colour, smoothed=False)

    best = run.best_fixed
    lines = [
        line("taking turns", run.colocated / run.oracle, 3),
        line(f"best fixed split: {best}", run.fixed[best] / run.oracle, 1),
        line("adaptive", run.adaptive / run.oracle, 0),
    ]
    title = f"{workload.name}: time of the rollout phase, times the oracle's"
    (folder / f"{stem}.svg").write_text(curves(lines, title), "utf-8")
    host = run.hosts[0]
    splits = [placement[SAMPLER] for placement in run.fixed]
    lines = [
        line("oracle", [splits[i] for i in host.splits.argmin(axis=1)], 2),
        line("adaptive", host.sampling, 0),
    ]
    title = f"{workload.name}: devices of a host that sample"
    (folder / f"{stem}-shares.svg").write_text(curves(lines, title), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
