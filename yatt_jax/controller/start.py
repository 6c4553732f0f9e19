"""From a plan to a finished run, by the loop that it is for."""

from __future__ import annotations

from pathlib import Path

from yatt_jax.controller import offline, online
from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.inputs import open_inputs
from yatt_jax.controller.offline_job import OfflineJob
from yatt_jax.controller.offline_plan import OfflinePlan
from yatt_jax.controller.offline_rows import open_rows
from yatt_jax.controller.online_job import OnlineJob
from yatt_jax.controller.online_plan import OnlinePlan


def check_inputs(plan: OnlinePlan | OfflinePlan, hosts: Hosts) -> list[str]:
    """Opens what a run reads, and closes it again; returns what is worth telling.

    Raises:
      InputError: files that are missing or malformed, functions that do not exist or do not take their arguments.
    """
    if isinstance(plan, OfflinePlan):
        return [f"an epoch has {open_rows(plan, hosts).steps_per_epoch} steps"]
    open_inputs(plan, hosts).scorer.close()
    return []


def run(plan: OnlinePlan | OfflinePlan, workdir: Path, hosts: Hosts, *, resume: str, overwrite: bool) -> int:
    """Runs a job to its end, or until it is told to stop; see ``Job``.

    Returns:
      Exit status of the command.
    """
    if isinstance(plan, OfflinePlan):
        with OfflineJob(plan, workdir, hosts, resume=resume, overwrite=overwrite) as job, job.stoppable():
            offline.train(job)
        return job.status
    with OnlineJob(plan, workdir, hosts, resume=resume, overwrite=overwrite) as job, job.stoppable():
        online.train(job)
    return job.status
