"""Times saving and restoring: ``python -m tools.bench_checkpoint --folder DIR [--gb 1]``.

Prints the size, the pause of the run, the time until the checkpoint exists, and the rates of saving, of checking the
files and of restoring; ``--json FILE`` writes the same figures. Saving waits for the disk. The page cache is left as it
is, so that the two kinds of reading come from memory where there is enough of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from yatt_jax.errors import InputError, RunFailure
from yatt_jax.io.checkpoint import Checkpoints
from yatt_jax.io.checkpoint_config import CheckpointConfig
from yatt_jax.types import PyTree

_COLUMNS = 4096


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_checkpoint", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--folder", required=True, help="written to in a new folder below it, which is removed again")
    parser.add_argument("--gb", type=float, default=1.0, help="size of the arrays")
    parser.add_argument("--arrays", type=int, default=12, help="number of arrays, of equal size")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=args.folder) as folder:
            figures = measure(Path(folder), args.gb, args.arrays, args.runs)
    except (InputError, RunFailure, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{figures['gb']:.2f} GB in {args.arrays} arrays on {len(jax.devices())} devices, medians of {args.runs}")
    for name, (label, unit) in _LABELS.items():
        print(f"{label:<40}{figures[name]:>9.2f} {unit}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return 0


_LABELS = {
    "pause_seconds": ("pause of the run", "s"),
    "save_seconds": ("until the checkpoint exists", "s"),
    "checksum_seconds": ("of it checksums", "s"),
    "hidden": ("share that the run does not wait for", ""),
    "save_gb_per_second": ("saving", "GB/s"),
    "verify_gb_per_second": ("checking before a resume", "GB/s"),
    "restore_gb_per_second": ("restoring", "GB/s"),
}


def measure(folder: Path, gb: float, arrays: int, runs: int) -> dict[str, float]:
    """Medians over saves and restores.

    Args:
      folder: an empty one.
      gb: size of all arrays.
      arrays: how many, float32, split over the devices by rows.
      runs: of each.
    """
    tree = _arrays(gb, arrays)
    size = sum(x.nbytes for x in jax.tree.leaves(tree)) / 1e9
    checkpoints = Checkpoints(folder, CheckpointConfig(keep=1))
    saves: list[dict[str, float]] = []
    for step in range(runs + 1):  # the first one also starts threads and compiles
        checkpoints.save(step, tree, {}, {})
        checkpoints.wait()
        saves.append(checkpoints.metrics())
    found = checkpoints.find()
    assert found is not None

    def restore() -> None:
        jax.block_until_ready(checkpoints.restore(found, tree))

    def median(name: str) -> float:
        return statistics.median(one[f"checkpoint/{name}"] for one in saves[1:])

    checks = statistics.median(_time(checkpoints.find) for _ in range(runs))
    restores = statistics.median(_time(restore) for _ in range(runs))
    checkpoints.close()
    return {
        "gb": size,
        "pause_seconds": median("pause_seconds"),
        "save_seconds": median("seconds"),
        "checksum_seconds": median("checksum_seconds"),
        "hidden": median("hidden"),
        "save_gb_per_second": size / median("seconds"),
        "verify_gb_per_second": size / checks,
        "restore_gb_per_second": size / restores,
    }


def _arrays(gb: float, count: int) -> PyTree:
    """Random numbers, which no file system can shrink."""
    devices = jax.devices()
    rows = max(1, round(gb * 1e9 / 4 / count / _COLUMNS / len(devices))) * len(devices)
    place = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    draw = jax.jit(lambda key: jax.random.normal(key, (rows, _COLUMNS), jnp.float32), out_shardings=place)
    return {f"array_{i}": jax.block_until_ready(draw(jax.random.key(i))) for i in range(count)}


def _time(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
