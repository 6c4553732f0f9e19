"""One process of a tiny offline job, as the many-process tests start it: ``YATT_TEST_JOB`` says which, as JSON.

Keys: ``name`` of the config, ``folder`` (the run directory is ``run`` in it) and ``changes`` (see
``offline_tiny.config``). The first process leaves the final parameters of all roles in ``params.npz``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from tests.controller import offline_tiny
from yatt_jax.controller.hosts import join
from yatt_jax.controller.offline import train
from yatt_jax.controller.offline_job import OfflineJob
from yatt_jax.controller.offline_plan import make_offline_plan


def main() -> None:
    """Runs the job."""
    spec = json.loads(os.environ["YATT_TEST_JOB"])
    config = offline_tiny.config(spec["name"], **spec["changes"])
    process, count = int(os.environ["YATT_TEST_PROCESS"]), int(os.environ["YATT_TEST_PROCESSES"])
    coordinator = os.environ["YATT_TEST_COORDINATOR"] if count > 1 else ""
    folder = Path(spec["folder"])
    with (
        join(config.controller, coordinator, count, process) as hosts,
        OfflineJob(make_offline_plan(config), folder / "run", hosts) as job,
    ):
        train(job)
        params = {role: state.params for role, state in job.states.items()}
        whole = jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), params)
        if hosts.is_main:
            np.savez(folder / "params.npz", *jax.tree.leaves(whole))


if __name__ == "__main__":
    main()
