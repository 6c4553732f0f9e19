"""Runs the stages of a pipeline: ``python -m tools.pipeline configs/pipeline/NAME.py[:VARIANT] --workdir=DIR``.

Each stage is a run or a command and writes into ``DIR/STAGE``. The same command goes on where it stopped: stages that
are done are passed over, and a run goes on from its newest checkpoint. Exit status: 0 when all are done, 75 when told
to stop (the stage has saved), else that of the stage that failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from yatt_jax.config import ConfigError, parse
from yatt_jax.errors import InputError, nearest
from yatt_jax.io.config_changes import compare, shown
from yatt_jax.typed import to_dict

STOPPED_EARLY = 75


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage as it is to be run.

    Attributes:
      name: of the stage and of its folder.
      command: words of the process.
      said: what it was told, to see whether that changes: resolved settings of a run, words of a command.
    """

    name: str
    command: list[str]
    said: dict[str, Any]


class Log:
    """Which stages are done, in ``DIR/pipeline.json``."""

    def __init__(self, folder: Path, file: str):
        self.path, self._file = folder / "pipeline.json", file
        self.done: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            try:
                held = json.loads(self.path.read_text("utf-8"))
                self.done, other = held["done"], held["pipeline"]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{self.path}: damaged ({error}); remove it, and all stages run again") from error
            if other != file:
                raise InputError(f"{folder}: holds the pipeline {other}, and this is {file}; name another --workdir")

    def write(self) -> None:
        """Writes the file, all of it or nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({"pipeline": self._file, "done": self.done}, indent=1) + "\n", "utf-8")
        os.replace(partial, self.path)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.pipeline", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pipeline", help="file with get_stages(folder, variant), and a variant after a colon")
    parser.add_argument("--workdir", required=True, help="folder of the stages' folders")
    parser.add_argument("--set", action="append", default=[], metavar="STAGE.KEY=VALUE", help="a setting of a run")
    parser.add_argument("--again", metavar="STAGE", help="discard this stage and all after it, and run them anew")
    parser.add_argument(
        "--launch", default="", help="what starts a run, as 'launch/local.sh 2'; by default one process"
    )
    parser.add_argument("--dry_run", action="store_true", help="show commands and what is done, and run nothing")
    args = parser.parse_args(argv)
    try:
        return run(args.pipeline, Path(args.workdir), args.set, args.again, shlex.split(args.launch), args.dry_run)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status


def run(
    pipeline: str, folder: Path, settings: Sequence[str], again: str | None, launch: Sequence[str], dry_run: bool
) -> int:
    """Runs what is not done of a pipeline; the arguments are those of the command.

    Raises:
      InputError: a file without stages, settings that do not fit, or a stage that was done with other settings.
    """
    stages = plan_stages(pipeline, folder, settings, launch)
    log = Log(folder, pipeline)
    names = [stage.name for stage in stages]
    if again is not None:
        if again not in names:
            raise InputError(f"--again={again}: no such stage{nearest(again, names)}; there are {names}")
        discard(log, folder, names[names.index(again) :], dry_run)
    for stage in stages:
        _check_unchanged(stage, log)
    for number, stage in enumerate(stages, 1):
        if stage.name in log.done:
            print(f"stage {number} of {len(stages)}, {stage.name}: done", flush=True)
            continue
        print(f"stage {number} of {len(stages)}, {stage.name}: {shlex.join(stage.command)}", flush=True)
        if dry_run:
            continue
        start = time.perf_counter()
        status = _call(stage.command)
        if status:
            what = "was told to stop" if status == STOPPED_EARLY else f"ended with status {status}"
            print(f"stage {stage.name} {what}; the same command goes on with it", file=sys.stderr)
            return status
        log.done[stage.name] = {"said": stage.said, "seconds": round(time.perf_counter() - start, 1)}
        log.write()
    if not dry_run:
        print("\n".join(["all stages are done", *(line for name in names for line in outcome(folder / name))]))
    return 0


def plan_stages(pipeline: str, folder: Path, settings: Sequence[str], launch: Sequence[str] = ()) -> list[Stage]:
    """The stages of a pipeline, every config checked.

    Raises:
      InputError: a file without stages, or settings that do not fit.
    """
    file, _, variant = pipeline.partition(":")
    stages = _get_stages(file)(str(folder), variant) if file else {}
    wanted: dict[str, list[str]] = {name: [] for name in stages}
    for setting in settings:
        name, dot, rest = setting.partition(".")
        if not dot or "=" not in rest or name not in stages:
            raise InputError(f"--set {setting}: expected STAGE.KEY=VALUE{nearest(name, stages)} of {list(stages)}")
        if not isinstance(stages[name], ConfigDict):
            raise InputError(f"--set {setting}: {name} is a command and has no config")
        wanted[name].append(f"--config.{rest}")
    starts = list(launch) or [sys.executable, "-m", "yatt_jax.main"]
    found = []
    for name, what in stages.items():
        if isinstance(what, ConfigDict):
            try:
                resolved = to_dict(parse(what))
            except ConfigError as error:
                raise InputError(f"stage {name}: {error}") from error
            variants = ",".join([name, *([variant] if variant else []), f"in={folder}"])
            command = [*starts, f"--config={file}:{variants}", f"--workdir={folder / name}", *wanted[name]]
            found.append(Stage(name, command, {"config": resolved, "set": wanted[name]}))
        else:
            found.append(Stage(name, [sys.executable, "-m", *what], {"command": list(what)}))
    return found


def _get_stages(file: str) -> Callable[[str, str], dict[str, Any]]:
    """The function of a pipeline's file, with its mistakes turned into ``InputError``."""
    spec = importlib.util.spec_from_file_location("pipeline", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        near = nearest(file, [str(path) for path in Path("configs/pipeline").glob("*.py")])
        raise InputError(f"{file}: no such pipeline{near}; expected a Python file with get_stages(folder, variant)")
    module = importlib.util.module_from_spec(spec)

    def get(folder: str, variant: str) -> dict[str, Any]:
        try:
            spec.loader.exec_module(module)  # type: ignore[union-attr]
            return dict(module.get_stages(folder, variant))
        except Exception as error:  # the file is a program, and may raise anything
            raise InputError(f"{file}: {type(error).__name__}: {error}") from error

    return get


def _check_unchanged(stage: Stage, log: Log) -> None:
    """A stage that is done must have been told what it would be told now: later ones were made from it."""
    if stage.name not in log.done:
        return
    said = json.loads(json.dumps(stage.said))
    changes = compare(log.done[stage.name]["said"], said)
    if changes:
        raise InputError(
            f"stage {stage.name} was done with other settings:\n{shown(changes)}\n--again={stage.name} runs it and "
            "what follows anew; or name another --workdir"
        )


def discard(log: Log, folder: Path, names: Sequence[str], dry_run: bool) -> None:
    """Removes what stages have written."""
    for name in names:
        if (folder / name).exists():
            print(f"{'would discard' if dry_run else 'discarding'} {folder / name}", flush=True)
            if not dry_run:
                shutil.rmtree(folder / name)
        log.done.pop(name, None)
    if not dry_run:
        log.write()


def _call(command: Sequence[str]) -> int:
    """Runs a process to its end; Ctrl-C and SIGTERM reach it as SIGTERM, upon which a run saves."""
    process = subprocess.Popen(command, process_group=0)
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda *_: process.send_signal(signal.SIGTERM))
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def outcome(folder: Path) -> list[str]:
    """How a run went: each held-out figure at its start and at its end; nothing for what is no run."""
    try:
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    except (OSError, ValueError):
        return []
    found = []
    for name in dict.fromkeys(name for line in metrics for name in line if name.startswith("eval/")):
        values = [
            line[name] for line in metrics if line.get(name) is not None
        ]  # no number: there was nothing to measure
        if values and not name.endswith("_ci95"):
            found.append(f"  {folder.name}: {name} {values[0]:.4g} -> {values[-1]:.4g}")
    return found


if __name__ == "__main__":
    sys.exit(main())
