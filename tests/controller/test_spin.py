"""SPIN as a run: iterations, the reference that is renewed in each, and what does not change them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.controller import tiny
from tests.controller.test_processes import check_same
from tests.controller.test_run import plan_on
from tests.processes import run_processes
from yatt_jax.config import ConfigError
from yatt_jax.controller.online import train
from yatt_jax.controller.online_job import OnlineJob

CHANGES: dict[str, Any] = {
    "algo": "spin",
    "steps": 4,
    "hyper__betas": (0.5, 0.2),
    "hyper__iteration_steps": 2,
    "actor_optimizer__schedule": "constant",
    "actor_optimizer__lr": 1e-3,
    "checkpoint__every_steps": 1,
    "evaluation__every": 2,
    "report__export": False,
}


def go(folder: Path, devices: int = 1, **changes: Any) -> Any:
    """Starts the run, or goes on with it; returns its final weights."""
    folder.mkdir(exist_ok=True)
    sizes = {"parallel__train__data": devices, "parallel__rollout__data": devices}
    with OnlineJob(plan_on(folder, devices, **CHANGES | sizes | changes), folder / "run") as job:
        train(job)
        return jax.device_get((job.states["actor"], job.frozen["reference"]))


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]


def sampled(folder: Path) -> dict[int, list[str]]:
    """The completions of each step."""
    found: dict[int, list[str]] = {}
    for file in (folder / "run").glob("samples*.jsonl"):
        for line in map(json.loads, file.read_text("utf-8").splitlines()):
            if line["split"] == "train":
                found.setdefault(line["step"], []).append(line["completion"])
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run of two iterations that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, go(folder)


def test_each_iteration_begins_with_the_policy_as_its_reference(whole: tuple[Path, Any]) -> None:
    lines = metrics(whole[0])
    found = [line["rollout/beta"] for line in lines[1:]]
    np.testing.assert_allclose(found, [0.5, 0.5, 0.2, 0.2], rtol=1e-6)
    apart = [abs(line["train/actor/preference_loss"] - math.log(2)) for line in lines[1:]]
    assert max(apart[0], apart[2]) < 1e-6 < 1e-5 < min(apart[1], apart[3])
    assert lines[1]["rollout/answer_length"] == pytest.approx(3.0)  # two letters and the end
    assert all("rollout/reward" in line for line in lines[1:])


@pytest.mark.slow
def test_the_reference_samples(tmp_path: Path, whole: tuple[Path, Any]) -> None:
    """Within an iteration the samples are those of weights that never change; in the next they are others."""
    go(tmp_path, actor_optimizer__lr=0.0)
    still, moving = sampled(tmp_path), sampled(whole[0])
    assert moving[1] == still[1]
    assert moving[2] == still[2]
    go(tmp_path / "far", actor_optimizer__lr=0.05)
    far = sampled(tmp_path / "far")
    assert far[2] == still[2]
    assert far[3] != still[3]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 3])
def test_a_run_that_goes_on_is_the_run_that_never_stopped(tmp_path: Path, whole: tuple[Path, Any], stop: int) -> None:
    go(tmp_path, steps=stop)
    for a, b in zip(jax.tree.leaves(whole[1]), jax.tree.leaves(go(tmp_path)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert sampled(tmp_path) == sampled(whole[0])


@pytest.mark.slow
def test_parking_and_keeping_change_nothing(tmp_path: Path, whole: tuple[Path, Any]) -> None:
    found = go(tmp_path, parallel__park="all", parallel__sampling_copy="keep")
    for a, b in zip(jax.tree.leaves(whole[1]), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "parallel"),
    [(2, 1, {"rollout__tensor": 2}), (2, 4, {"train__fsdp": 2, "train__tensor": 2, "rollout__tensor": 2})],
)
def test_the_same_run_for_several_processes(
    tmp_path: Path, whole: tuple[Path, Any], processes: int, devices: int, parallel: dict[str, int]
) -> None:
    sizes = {f"parallel__{name}": size for name, size in parallel.items()}
    spec = {"folder": str(tmp_path), "changes": CHANGES | sizes, "save": str(tmp_path / "params.npz")}
    run_processes(
        ["tests/controller/job_process.py"], processes, devices, timeout=300, env={"YATT_TEST_JOB": json.dumps(spec)}
    )
    with np.load(tmp_path / "params.npz") as saved:
        params = [saved[name] for name in saved.files]
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(whole[1][0].params)]
    everything = [{step: sorted(texts) for step, texts in sampled(f).items()} for f in (tmp_path, whole[0])]
    check_same((expected, [everything[1]]), (params, [everything[0]]))


def test_another_reference_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.model.reference = .*: spin makes the policy its own reference"):
        tiny.plan(tiny.config(tmp_path, **CHANGES, model__reference="configs/data/digits_teacher"))


def test_responses_of_another_iteration_are_a_fault(tmp_path: Path) -> None:
    late: dict[str, Any] = {"rollout__tail": "ahead", "rollout__max_staleness": 1}
    with pytest.raises(ConfigError, match=r"config.rollout: spin compares .* needs tail = 'wait' or 'abort'"):
        tiny.plan(tiny.config(tmp_path, **CHANGES, **late))
