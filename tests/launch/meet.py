"""Stands for ``python -m yatt_jax.main`` under a real launcher: joins the other processes and adds numbers up.

Every process writes ``process P of N devices D sum S`` into the file met.P of the workdir. Then MEET decides, a word
for each attempt and the last one for all further ones: ``end``; ``fail``, process 1 exits with 3 and the others 2 s
later with 1; ``stop``, process 1 stops itself (SIGSTOP) and the others exit with 1; ``wait``, exit with 75 on SIGTERM;
``bad``, exit with 2 before joining.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path


def main() -> None:
    """Joins, adds up, behaves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", default=None)
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--process", type=int, default=None)
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--workdir", type=Path, required=True)
    flags, _ = parser.parse_known_args()
    attempt = _count(flags.workdir)
    words = os.environ.get("MEET", "end").split(",")
    word = words[min(attempt, len(words)) - 1]
    if word == "bad":
        sys.exit(2)

    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if flags.distributed:
        jax.distributed.initialize()
    else:
        jax.distributed.initialize(flags.coordinator, flags.processes, flags.process)
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    index = jax.process_index()
    total = int(np.sum(multihost_utils.process_allgather(np.array(index + 1))))
    # Into a file: on standard output the collectives' own messages may come in between.
    with (flags.workdir / f"met.{index}").open("a") as file:
        file.write(f"process {index} of {jax.process_count()} devices {jax.device_count()} sum {total}\n")
    match word:
        case "fail":
            threading.Event().wait(0 if index else 2)
            _leave(3 if index else 1)
        case "stop":
            if index:
                os.kill(os.getpid(), signal.SIGSTOP)
            threading.Event().wait(2)
            _leave(1)
        case "wait":
            (flags.workdir / f"waits.{index}").touch()
            while not asked.wait(0.1):
                pass
            multihost_utils.sync_global_devices("saved")
            _leave(75)
    multihost_utils.sync_global_devices("end")


def _leave(status: int) -> None:
    sys.stdout.flush()
    os._exit(status)


def _count(workdir: Path) -> int:
    """Which attempt this is of this process's."""
    name = os.environ.get("SLURM_PROCID") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    path = workdir / f"attempts.{name}"
    with path.open("a") as file:
        file.write("x")
    return len(path.read_text())


if __name__ == "__main__":
    main()
