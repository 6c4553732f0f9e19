"""Jobs of several processes: the same run for any number of them, and an end for all when one is lost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import run_processes, start_processes

PROGRAM = ["tests/controller/job_process.py"]
# Adam divides by the gradient's size: a large rate would show rounding in entries whose gradient is near 0.
CHANGES = {
    "actor_optimizer__lr": 1e-3,
    "critic_optimizer__lr": 1e-3,
    "steps": 3,
    "hyper__minibatches": 2,
    "hyper__epochs": 2,
    "train__micro_rows": 1,
    "rollout__sampling__top_p": 0.9,
    "report__export": False,
}


def run(folder: Path, processes: int, devices: int, **changes: Any) -> tuple[list[np.ndarray], list[Any]]:
    """Runs the job; returns the final parameters and every sample as (step, split, id, text, rewards)."""
    folder.mkdir(exist_ok=True)
    spec = {"folder": str(folder), "changes": CHANGES | changes, "save": str(folder / "params.npz")}
    run_processes(PROGRAM, processes, devices, timeout=300, env={"YATT_TEST_JOB": json.dumps(spec)})
    with np.load(folder / "params.npz") as saved:
        params = [saved[name] for name in saved.files]
    return params, samples(folder / "run")


def samples(folder: Path) -> list[Any]:
    found = []
    for file in folder.glob("samples*.jsonl"):
        for line in file.read_text("utf-8").splitlines():
            r = json.loads(line)
            found.append((r["step"], r["split"], r["sample_id"], r["group"], r["completion"], r["total"]))
    return sorted(found)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[np.ndarray], list[Any]]:
    """The run of one process with one device."""
    return run(tmp_path_factory.mktemp("alone"), 1, 1)


def check_same(one: tuple[list[np.ndarray], list[Any]], other: tuple[list[np.ndarray], list[Any]]) -> None:
    assert one[1] == other[1]
    for a, b in zip(one[0], other[0], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def split(**sizes: int) -> dict[str, int]:
    return {f"parallel__{name}": size for name, size in sizes.items()}


# Two processes that share a tensor group; two that each sample alone; four of which two share each tensor group.
QUICK = [
    (2, 1, split(train__fsdp=2, train__data=1, rollout__tensor=2)),
    pytest.param(2, 2, split(train__fsdp=2, train__tensor=2, rollout__tensor=2), marks=pytest.mark.slow),
    pytest.param(4, 1, split(train__fsdp=2, rollout__tensor=2), marks=pytest.mark.slow),
]
EVERY = [(n, d, split(train__fsdp=2 if n * d > 1 else 1)) for n in (1, 2, 4) for d in (1, 2, 4)]


@pytest.mark.parametrize(("processes", "devices", "parallel"), QUICK)
def test_the_same_run_for_several_processes(
    tmp_path: Path, alone: Any, processes: int, devices: int, parallel: dict[str, int]
) -> None:
    check_same(alone, run(tmp_path, processes, devices, **parallel))


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices", "parallel"), EVERY)
def test_the_same_run_for_any_processes_and_devices(
    tmp_path: Path, alone: Any, processes: int, devices: int, parallel: dict[str, int]
) -> None:
    check_same(alone, run(tmp_path, processes, devices, **parallel))


@pytest.mark.slow
def test_more_processes_than_prompts(tmp_path: Path) -> None:
    changes = {"rollout__prompts": 2, "hyper__minibatches": 1, "data__holdout": 3}
    one, many = run(tmp_path / "one", 1, 1, **changes), run(tmp_path / "many", 4, 1, **changes)
    check_same(one, many)


# Ends of whole jobs; those in ``test_hosts`` are quicker to start. Process 0 holds the service that the others meet at,
# so its end is another case than that of process 1.
FAULTS = [
    (kind, where, process)
    for kind in ("kill", "stop", "raise")
    for where in ("respond", "score", "update", "finish")
    for process in (0, 1)
]
PHASES = {"respond": "rollout", "score": "score", "update": "train", "finish": "evaluate"}
TIMEOUT = 12.0


def check_end(folder: Path, kind: str, where: str, process: int, processes: int = 2) -> None:
    """One process meets its end; all others must be gone in time, each with a message that names it."""
    folder.mkdir(exist_ok=True)
    changes = CHANGES | {"controller__timeout_s": TIMEOUT, "evaluation__every": 0}
    fault = {"kind": kind, "where": where, "process": process}
    spec = {"folder": str(folder), "changes": changes, "fault": fault}
    with start_processes(PROGRAM, processes, 1, env={"YATT_TEST_JOB": json.dumps(spec)}) as group:
        group.wait_for_text(0, "step 1/3" if where != "finish" else "step 3/3", 200)
        others = [p for p in range(processes) if p != process]
        # The step before is written, so the fault comes within moments; what is left are the deadline and an exit.
        ended = group.wait(TIMEOUT + 10, others)
        for one in ended:
            assert one.returncode not in (0, None)
            named = rf"stopped: process {process} \(host \S+, phase {PHASES[where]}, step \d\)"
            if where != "finish":
                assert re.search(named, one.stderr), one.stderr[-3000:]
            assert f"stopped: process {process} " in one.stderr, one.stderr[-3000:]
            assert ("ArithmeticError: the fault of this test" in one.stderr) == (kind == "raise")
        if kind == "raise":
            (own,) = group.wait(5, [process])
            assert own.returncode == 1
            assert "in meet" in own.stderr or "in replaced" in own.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "where", "process"), FAULTS)
def test_a_process_lost_in_any_phase_ends_the_others(tmp_path: Path, kind: str, where: str, process: int) -> None:
    check_end(tmp_path, kind, where, process, processes=3)


@pytest.mark.slow
@pytest.mark.parametrize("time", range(20))
def test_no_end_hangs(tmp_path: Path, time: int) -> None:
    check_end(tmp_path, *FAULTS[time * 7 % len(FAULTS)])
