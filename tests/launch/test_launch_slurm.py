"""launch/slurm.sbatch with stand-ins for srun and scontrol; test_launch_slurm_real.py has the real ones."""

from __future__ import annotations

import pytest

from tests.launch.fakes import Fake

SRUN = r"""#!/bin/bash
printf '%s\n' "$@" >"$FAKE_LOG/srun"
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 exec "$@"
"""
SCONTROL = r"""#!/bin/bash
echo "$@" >>"$FAKE_LOG/scontrol"
"""
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "1"}


@pytest.fixture
def slurm(fake: Fake) -> Fake:
    fake.program("srun", SRUN)
    fake.program("scontrol", SCONTROL)
    return fake


def test_the_step_runs_the_command_on_every_node(slurm: Fake) -> None:
    done = slurm.run("slurm.sbatch", "--config=a b", "--workdir=w", **JOB)
    assert done.returncode == 0
    assert slurm.arguments(0) == ["-m", "yatt_jax.main", "--config=a b", "--workdir=w", "--distributed"]
    assert {"--wait=75", "--kill-on-bad-exit=0"} <= set((slurm.log / "srun").read_text().splitlines())
    assert "JAX_LOCAL_DEVICE_IDS" not in slurm.variables(0)


@pytest.mark.parametrize(("tasks", "ids"), [("1", "0,1,2,3"), ("4", None)])
def test_a_process_alone_on_its_node_takes_all_gpus(slurm: Fake, tasks: str, ids: str | None) -> None:
    settings = JOB | {"SLURM_NTASKS_PER_NODE": tasks, "SLURM_GPUS_ON_NODE": "4"}
    assert slurm.run("slurm.sbatch", **settings).returncode == 0
    assert slurm.variables(0).get("JAX_LOCAL_DEVICE_IDS") == ids


@pytest.mark.parametrize(("status", "starts"), [(1, 3), (137, 3), (2, 1), (0, 1)])
def test_failures_are_repeated_on_the_same_nodes(slurm: Fake, status: int, starts: int) -> None:
    done = slurm.run("slurm.sbatch", RESTARTS="2", FAKE=f"exit {status}", **JOB)
    assert done.returncode == status
    assert slurm.starts() == starts
    assert not (slurm.log / "scontrol").exists()


def test_a_restart_that_works_ends_the_job(slurm: Fake) -> None:
    done = slurm.run("slurm.sbatch", FAKE="exit $((attempt == 1))", **JOB)
    assert (done.returncode, slurm.starts()) == (0, 2)


@pytest.mark.parametrize("status", [75, 143])
@pytest.mark.parametrize(("restarts", "requeued"), [("0", True), ("1", True), ("2", False)])
def test_an_early_stop_puts_the_job_back_into_the_queue(
    slurm: Fake, restarts: str, requeued: bool, status: int
) -> None:
    settings = JOB | {"SLURM_RESTART_COUNT": restarts, "RESTARTS": "2"}
    done = slurm.run("slurm.sbatch", FAKE=f"exit {status}", **settings)
    assert done.returncode in (75, status)
    assert slurm.starts() == 1
    assert (slurm.log / "scontrol").exists() == requeued
    if requeued:
        assert (slurm.log / "scontrol").read_text() == "requeue 4711\n"
