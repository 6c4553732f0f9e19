"""Runs that stop and go on: the same in the end as one that never stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.controller.test_run import plan_on
from tests.processes import start_processes
from yatt_jax.controller.job import STOPPED_EARLY
from yatt_jax.controller.online import train
from yatt_jax.controller.online_job import OnlineJob
from yatt_jax.errors import InputError

CHANGES = {
    "steps": 4,
    "checkpoint__every_steps": 2,
    "evaluation__every": 2,
    "hyper__epochs": 2,
    "hyper__minibatches": 2,
    "hyper__kl__adaptive_target": 0.05,
    # So that the number of steps changes nothing about the first ones.
    "actor_optimizer__schedule": "constant",
    "critic_optimizer__schedule": "constant",
    # Adam divides by the gradient's size: a large rate would show rounding in entries whose gradient is near 0.
    "actor_optimizer__lr": 1e-3,
    "critic_optimizer__lr": 1e-3,
    "report__export": False,
}
PROGRAM = ["tests/controller/job_process.py"]


class Crash(Exception):
    """Stands for the end of the process."""


def go(
    folder: Path,
    devices: int = 1,
    *,
    resume: str = "latest",
    overwrite: bool = False,
    at: Callable[[OnlineJob], None] | None = None,
    **changes: Any,
) -> tuple[Any, int]:
    """Starts the run, or goes on with it; returns its final state and status. ``at`` may tamper with the job."""
    changes = CHANGES | {"parallel__train__data": devices, "parallel__rollout__data": devices} | changes
    with OnlineJob(plan_on(folder, devices, **changes), folder / "run", resume=resume, overwrite=overwrite) as job:
        if at is not None:
            at(job)
        with job.stoppable():
            train(job)
        state = (job.states, job.kl_coef, job.prompts.state()["drawn"])
        return jax.device_get(state), job.status


def written(folder: Path) -> dict[str, list[Any]]:
    """What the run has logged, without what differs by time."""

    def timeless(record: dict[str, Any]) -> dict[str, Any]:
        clocks = ("time/", "checkpoint/", "rollout/tokens_per_second", "rollout/repartition_seconds")
        return {name: value for name, value in record.items() if not name.startswith(clocks)}

    found = {}
    for log in ("metrics", "samples"):
        lines = [json.loads(line) for line in (folder / "run" / f"{log}.jsonl").read_text("utf-8").splitlines()]
        found[log] = sorted((timeless(line) for line in lines), key=lambda r: (r["step"], str(r)))
    return found


def at_call(method: str, number: int, act: Callable[[], None]) -> Callable[[OnlineJob], None]:
    """Acts within the given call of a method of the job."""

    def tamper(job: OnlineJob) -> None:
        original, calls = getattr(job, method), []

        def replaced(*args: Any, **named: Any) -> Any:
            calls.append(1)
            if len(calls) == number:
                act()
            return original(*args, **named)

        setattr(job, method, replaced)

    return tamper


def crash() -> None:
    raise Crash


def tell() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def check_same(one: Any, other: Any, *, exact: bool = True) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0 if exact else 1e-5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    state, status = go(folder)
    assert status == 0
    return folder, state


TAILS: list[dict[str, Any]] = [
    {"rollout__tail": "carry", "rollout__extra_prompts": 2, "rollout__budget": 8, "rollout__max_staleness": 2},
    {"rollout__tail": "ahead", "rollout__max_staleness": 2},
    {"rollout__dynamic__enabled": True, "rollout__max_staleness": 1, "rollout__dynamic__max_waves": 3},
]


def waiting(tail: dict[str, Any]) -> dict[str, Any]:
    """Changes with which rows wait between steps, and some are used late."""
    return tail | {
        "rollout__prompts": 4,
        "rollout__samples_per_prompt": 2,
        "rollout__sampling__max_new_tokens": 20,
        "hyper__correction__how": "truncate",
        "rewards": {"share_of_a": {"fn": "tests.controller.tiny:share_of_a", "chunk": 2}},
        "reward_workers": 2,
    }


CARRY = waiting(TAILS[0])


def check_late(folder: Path) -> None:
    """Some rows were sampled by older weights, and are corrected for that."""
    figures = [line for line in written(folder)["metrics"] if line["step"]]
    assert max(line["rollout/staleness"] for line in figures) > 0
    assert all(np.isfinite(line["rollout/correction_mean"]) for line in figures)


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run that was never stopped, in which responses wait between steps."""
    folder = tmp_path_factory.mktemp("carried")
    state, status = go(folder, **CARRY)
    assert status == 0
    check_late(folder)
    return folder, state


def check_stopped_twice(
    folder: Path, expected: tuple[Path, Any], method: str, call: int, told: str, told_call: int, **changes: Any
) -> None:
    """Crashes within a call of a method, is told to stop within another, and ends; it must be the expected run."""
    with pytest.raises(Crash):
        go(folder, at=at_call(method, call, crash), **changes)
    _, status = go(folder, at=at_call(told, told_call, tell), **changes)
    assert status == STOPPED_EARLY
    state, status = go(folder, **changes)
    assert status == 0
    check_same(expected[1], state)
    assert written(folder) == written(expected[0])


# A crash in the third step, which goes back to the checkpoint of the second; then a signal in the fourth.
def test_a_run_that_stopped_twice_is_the_run_that_never_did(tmp_path: Path, carried: tuple[Path, Any]) -> None:
    """Responses that have not ended, and whole ones that wait for their step, are kept as well."""
    check_stopped_twice(tmp_path, carried, "update", 18, "respond", 2, **CARRY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "call", "told", "told_call"),
    [("update", 18, "respond", 2), ("collect", 3, "update", 2), ("report", 3, "prepare", 2)],
)
def test_it_is_wherever_it_stopped(
    tmp_path: Path, whole: tuple[Path, Any], method: str, call: int, told: str, told_call: int
) -> None:
    check_stopped_twice(tmp_path, whole, method, call, told, told_call)


@pytest.mark.slow
@pytest.mark.parametrize("tail", TAILS[1:])
def test_rows_that_wait_between_steps_are_kept(tmp_path: Path, tail: dict[str, Any]) -> None:
    changes = waiting(tail)
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    state, _ = go(tmp_path / "one", **changes)
    check_late(tmp_path / "one")
    check_stopped_twice(tmp_path / "other", (tmp_path / "one", state), "update", 18, "respond", 2, **changes)


@pytest.mark.slow
def test_a_run_goes_on_with_other_devices_and_more_steps(tmp_path: Path, whole: tuple[Path, Any]) -> None:
    sizes: dict[str, Any] = {"parallel__train__data": 2, "parallel__train__fsdp": 2, "parallel__train__tensor": 2}
    go(tmp_path, 8, steps=2, **sizes)
    state, _ = go(tmp_path, 4, parallel__train__data=1, parallel__train__fsdp=4)
    check_same(whole[1], state, exact=False)
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["resumed"][0]["step"] == 2
    assert "steps: 2 -> 4" in saved["resumed"][0]["changes"]


def test_what_a_run_may_go_on_with(carried: tuple[Path, Any]) -> None:
    folder = carried[0]
    before = written(folder)
    with pytest.raises(InputError, match=r"cannot go on .*\nconfig.seed: 3 -> 4"):
        go(folder, **CARRY, seed=4)
    with pytest.raises(InputError, match="--resume=never would discard them"):
        go(folder, resume="never", **CARRY)
    with pytest.raises(InputError, match="no checkpoint of step 3; there are 2, 4"):
        go(folder, resume="3", **CARRY)
    with pytest.raises(InputError, match="--resume=soon: expected"):
        go(folder, resume="soon", **CARRY)
    assert written(folder) == before


def test_a_run_goes_on_from_a_step_that_is_named_and_forgets_later_ones(tmp_path: Path, carried: Any) -> None:
    shutil.copytree(carried[0], tmp_path / "again")
    folder = tmp_path / "again"
    state, _ = go(folder, resume="2", data__train=(str(carried[0] / "prompts.jsonl"),), **CARRY)
    check_same(carried[1], state)
    assert written(folder) == written(carried[0])
    # Once more: it is finished, and nothing changes.
    state, status = go(folder, data__train=(str(carried[0] / "prompts.jsonl"),), **CARRY)
    assert status == 0
    check_same(carried[1], state)
    assert written(folder) == written(carried[0])


@pytest.mark.slow
def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(tmp_path: Path, whole: Any) -> None:
    with pytest.raises(Crash):
        go(tmp_path, at=at_call("report", 2, crash))
    state, _ = go(tmp_path)
    check_same(whole[1], state)
    assert written(tmp_path) == written(whole[0])


def test_a_run_stops_when_it_no_longer_improves(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"checkpoint__best_metric": "eval/reward", "checkpoint__early_stop_patience": 1}
    changes |= {"evaluation__every": 1, "rewards": {"one": {"fn": "tests.controller.test_reward_models:always_one"}}}
    changes = CARRY | changes | {"steps": 30}
    _, status = go(tmp_path, **changes)
    assert status == 0
    before = written(tmp_path)
    assert max(line["step"] for line in before["metrics"]) == 2
    _, status = go(tmp_path, **changes)  # it has ended, and trains no further
    assert status == 0
    assert written(tmp_path) == before


def test_the_time_that_a_run_may_take(tmp_path: Path) -> None:
    _, status = go(tmp_path, max_minutes=1e-6, **CARRY)
    assert status == STOPPED_EARLY
    assert [line["step"] for line in written(tmp_path)["metrics"]] == [0]


def spec(folder: Path, **changes: Any) -> dict[str, str]:
    return {
        "YATT_TEST_JOB": json.dumps(
            {"folder": str(folder), "changes": CHANGES | changes, "save": str(folder / "params.npz")}
        )
    }


def killed_until_done(
    folder: Path, processes: int, delay: Callable[[], float], kills: int, **changes: Any
) -> tuple[list[np.ndarray], int]:
    """Kills the job again and again at some moment, then lets it end.

    Returns:
      The final parameters, and how many times it was killed: no more once it has ended by itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    changes = {"controller__timeout_s": 12.0, "checkpoint__every_steps": 1} | changes
    killed = 0
    for kill in range(kills):
        with start_processes(PROGRAM, processes, 1, env=spec(folder, **changes)) as group:
            victims = range(processes) if kill % 2 else [kill // 2 % processes]
            if group.wait_for_text_or_end(0, "rollout", 120) or group.wait_for_end(delay(), victims):
                break
            for victim in victims:
                group.signal(victim, signal.SIGKILL)
            codes = [done.returncode for done in group.wait(60)]
            killed += any(codes[victim] == -signal.SIGKILL for victim in victims)
    with start_processes(PROGRAM, processes, 1, env=spec(folder, **changes)) as group:
        for done in group.wait(200):
            assert done.returncode == 0, done.stderr[-3000:]
    with np.load(folder / "params.npz") as saved:
        return [saved[name] for name in saved.files], killed


def check_killed(folder: Path, whole: tuple[Path, Any], processes: int, kills: int, *, exact: bool) -> None:
    """Kills runs at random moments, ``kills`` times in all, no run more than 5 times; each must end as ``whole``."""
    dice = random.Random(0)
    begin = time.monotonic()
    killed_until_done(folder / "never", processes, lambda: 0.0, 0)  # how long the whole takes, and programs compiled
    longest, killed, run = max(1.0, (time.monotonic() - begin) / 2), 0, 0
    expected = jax.tree.leaves({role: state.params for role, state in whole[1][0].items()})
    while killed < kills:
        own = folder / str(run)
        found, landed = killed_until_done(own, processes, lambda: dice.uniform(0, longest), min(5, kills - killed))
        killed, run = killed + landed, run + 1
        assert run < 3 * kills, f"of {run} runs only {killed} could be killed"
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=0 if exact else 1e-5)
        if processes == 1:
            assert written(own) == written(whole[0])


@pytest.mark.slow
def test_thirty_kills(tmp_path: Path, whole: tuple[Path, Any]) -> None:
    check_killed(tmp_path, whole, 1, 30, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_killed_one_or_all(tmp_path: Path, whole: tuple[Path, Any], processes: int) -> None:
    check_killed(tmp_path, whole, processes, 8, exact=False)


@pytest.mark.slow
def test_one_two_and_four_processes_in_turn(tmp_path: Path, whole: tuple[Path, Any]) -> None:
    found: list[np.ndarray] = []
    for steps, processes in ((1, 1), (2, 2), (3, 4), (4, 1)):
        found, _ = killed_until_done(tmp_path, processes, lambda: 0.0, 0, steps=steps)
    expected = jax.tree.leaves({role: state.params for role, state in whole[1][0].items()})
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [5, 6, 7])
def test_rows_are_seen_once_an_epoch_wherever_the_run_stops(tmp_path: Path, stop: int) -> None:
    """28 rows, 4 a step: an epoch is 7 steps, so the stops lie inside, at and beyond its end."""
    changes: dict[str, Any] = {"rollout__prompts": 4, "checkpoint__every_steps": 1, "hyper__epochs": 1}
    for steps, devices in ((stop, 8), (stop + 2, 4), (14, 2)):
        go(tmp_path, devices, steps=steps, **changes)
    seen = [r["prompt_index"] for r in written(tmp_path)["samples"] if r["split"] == "train"]
    rows = len((tmp_path / "prompts.jsonl").read_text().splitlines()) - 4
    assert rows == 28
    assert len(set(seen[:28])) == 28
    assert len(set(seen[28:])) == 28
