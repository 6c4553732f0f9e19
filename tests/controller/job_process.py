"""One process of a tiny job, as the many-process tests start it: ``YATT_TEST_JOB`` says which, as JSON.

Keys: ``folder`` (of data and run directory ``run``), ``changes`` (see ``tiny.config``), ``save`` (file for the final
parameters of all roles), and ``fault``: ``{"kind": "kill" | "stop" | "raise", "where": method, "process": p}`` lets a
process meet its end in the second step, inside a method of the job.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tests.controller import tiny
from yatt_jax.config import parse
from yatt_jax.controller.hosts import join
from yatt_jax.controller.online import train
from yatt_jax.controller.online_job import OnlineJob

KINDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def meet(fault: dict[str, Any], job: OnlineJob) -> None:
    """Replaces a method of the job by one that, in the second step, ends or stops this process half-way."""
    original = getattr(job, fault["where"])

    def replaced(*args: Any, **named: Any) -> Any:
        if job._step == 2 or fault["where"] == "finish":
            time.sleep(2)  # the others know by now which phase this is
            if fault["kind"] == "raise":
                raise ArithmeticError("the fault of this test")
            os.kill(os.getpid(), KINDS[fault["kind"]])
        return original(*args, **named)

    setattr(job, fault["where"], replaced)


def main() -> None:
    """Runs the job."""
    spec = json.loads(os.environ["YATT_TEST_JOB"])
    config = tiny.config(Path(spec["folder"]), **spec.get("changes", {}))
    process = int(os.environ["YATT_TEST_PROCESS"])
    count = int(os.environ["YATT_TEST_PROCESSES"])
    coordinator = os.environ["YATT_TEST_COORDINATOR"] if count > 1 else ""
    folder = Path(spec["folder"]) / "run"
    limits = parse(config).controller
    with join(limits, coordinator, count, process) as hosts, OnlineJob(tiny.plan(config), folder, hosts) as job:
        fault = spec.get("fault")
        if fault and fault["process"] == process:
            meet(fault, job)
        train(job)
        if spec.get("save"):
            params = {role: state.params for role, state in job.states.items()}
            whole = jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), params)
            if hosts.is_main:
                np.savez(spec["save"], *jax.tree.leaves(whole))


if __name__ == "__main__":
    main()
