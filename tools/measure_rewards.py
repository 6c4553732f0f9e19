"""Mean and deviation of each reward on samples of a run.

    python -m tools.measure_rewards RUN_DIR [--step N] [--split eval]

With them as ``rewards.NAME.mean`` and ``std``, rewards of any origin have one scale. By default the samples are those
of the policy that the run began with, on held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from yatt_jax.errors import InputError


def read(run: Path) -> list[dict[str, Any]]:
    """The samples that a run wrote, those of all its processes.

    Raises:
      InputError: there are none, or a line is damaged.
    """
    files = sorted(run.glob("samples*.jsonl"))
    if not files:
        raise InputError(f"{run}: no samples.jsonl; give the directory of a run that samples")
    records = []
    for file in files:
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise InputError(f"{file}:{number}: damaged: {error}") from error
    return records


def moments(records: Iterable[dict[str, Any]]) -> dict[str, tuple[float, float, int]]:
    """Mean, standard deviation and number of each reward's values that are numbers."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record["rewards"].items():
            if isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(name, []).append(value)
    return {name: (statistics.fmean(of), statistics.pstdev(of), len(of)) for name, of in values.items()}


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.measure_rewards", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--step", type=int, help="of the samples; the first by default")
    parser.add_argument("--split", choices=("eval", "train"), default="eval", help="held-out or training prompts")
    args = parser.parse_args(arguments)
    try:
        records = [record for record in read(args.run) if record["split"] == args.split]
        steps = sorted({record["step"] for record in records})
        step = args.step if args.step is not None else next(iter(steps), None)
        if step not in steps:
            raise InputError(f"{args.run}: no {args.split} samples of step {step}; there are those of {steps}")
        found = moments(record for record in records if record["step"] == step)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, (mean, std, count) in found.items():
        print(f"config.rewards.{name}.mean = {mean:.6g}")
        if std > 0:
            print(f"config.rewards.{name}.std = {std:.6g}  # {count} {args.split} samples of step {step}")
        else:
            print(f"# {name} is the same for all {count} samples: there is no deviation to divide by")
    return 0


if __name__ == "__main__":
    sys.exit(main())
