"""Whole runs of a tiny job: what they write, what stops them, what does not change them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.compilations import BACKEND, compilations
from tests.controller import tiny
from yatt_jax.config import ConfigError, parse
from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.online import train
from yatt_jax.controller.online_job import OnlineJob
from yatt_jax.controller.online_plan import OnlinePlan
from yatt_jax.controller.plan import make_plan
from yatt_jax.controller.rows import Mover, minibatch_rows
from yatt_jax.errors import InputError, RunFailure
from yatt_jax.parallel.park import is_parked
from yatt_jax.rewards import RewardError, Scores, Scoring
from yatt_jax.rollout.engine import Engine
from yatt_jax.types import Inputs, Rollout


def run(folder: Path, name: str = "run", *, data: int = 1, **changes: Any) -> dict[str, Any]:
    """Runs a tiny job on ``data`` devices and returns its final parameters."""
    changes = {"parallel__train__data": data, "parallel__rollout__data": data} | changes
    plan = plan_on(folder, data, **changes)
    with OnlineJob(plan, folder / name) as job:
        train(job)
        return jax.device_get({role: state.params for role, state in job.states.items()})


def plan_on(folder: Path, devices: int, **changes: Any) -> OnlinePlan:
    config = tiny.config(folder, **changes)
    some = jax.devices()[:devices]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda: some)
        return tiny.plan(config)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def test_a_run_writes_everything_it_promises(tmp_path: Path) -> None:
    run(tmp_path, report__tensorboard=True)
    folder = tmp_path / "run"
    metrics = lines(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [0, 1, 2]
    assert {"eval/reward", "eval/reward_ci95"} <= metrics[0].keys()
    for name in ("rollout/reward", "rollout/kl_k3", "train/actor/ratio_max", "train/critic/value_loss", "time/train"):
        assert name in metrics[1], name
    assert "eval/reward" not in metrics[1]
    assert "eval/reward" in metrics[2]
    samples = lines(folder / "samples.jsonl")
    assert {(s["step"], s["split"]) for s in samples} == {(0, "eval"), (1, "train"), (2, "train"), (2, "eval")}
    assert {t["phase"] for t in lines(folder / "timeline.jsonl")} >= {"load", "rollout", "score", "train", "evaluate"}
    assert json.loads((folder / "config.json").read_text())["config"]["steps"] == 2
    assert "<svg" in (folder / "report.html").read_text("utf-8")
    assert list((folder / "tensorboard").iterdir())
    assert (folder / "export" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    # Adam divides by the gradient's size: a large rate would show rounding in entries whose gradient is near 0.
    rates: dict[str, Any] = {"actor_optimizer__lr": 1e-3, "critic_optimizer__lr": 1e-3}
    one = run(tmp_path, "one", **rates)
    again = run(tmp_path, "again", **rates)
    other = run(tmp_path, "other", seed=4, **rates)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    texts = [[s["completion"] for s in lines(tmp_path / n / "samples.jsonl")] for n in ("one", "again", "other")]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


TRAIN = [
    {"train__data": 8},
    {"train__data": 1, "train__fsdp": 8},
    {"train__data": 1, "train__fsdp": 4, "train__tensor": 2},
    {"train__data": 2, "train__fsdp": 2, "train__tensor": 2},
]
SAMPLE = [
    {"rollout__data": 8},
    {"rollout__data": 4, "rollout__tensor": 2},
    {"rollout__data": 2, "rollout__tensor": 4},  # more than the key-value heads
]
PARTITIONS = [
    pytest.param(t | s, marks=[] if (i, j) == (3, 1) else pytest.mark.slow)
    for i, t in enumerate(TRAIN)
    for j, s in enumerate(SAMPLE)
]


@pytest.mark.parametrize("sizes", PARTITIONS)
def test_three_steps_are_the_same_in_every_partition(
    tmp_path: Path, three_steps: tuple[Path, dict[str, Any]], sizes: dict[str, int]
) -> None:
    changes: dict[str, Any] = {f"parallel__{name}": size for name, size in sizes.items()}
    found = run(tmp_path, data=8, **THREE | changes)
    assert completions(tmp_path) == completions(three_steps[0])
    for a, b in zip(jax.tree.leaves(three_steps[1]), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


THREE: dict[str, Any] = {"steps": 3, "actor_optimizer__lr": 1e-3, "critic_optimizer__lr": 1e-3, "report__export": False}


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Three steps on one device."""
    folder = tmp_path_factory.mktemp("three")
    return folder, run(folder, **THREE)


def completions(folder: Path) -> list[str]:
    return [s["completion"] for s in lines(folder / "run" / "samples.jsonl")]


@pytest.mark.slow
def test_parking_and_keeping_change_nothing_but_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"parallel__train__data": 1, "parallel__train__fsdp": 2, "report__export": False}
    plain = run(tmp_path, "plain", data=2, **sizes)
    parked: list[dict[str, bool]] = []
    generate = Engine.generate

    def look(engine: Engine, *args: Any, **named: Any) -> Any:
        leaves = {role: jax.tree.leaves(job[0].states[role].opt)[1] for role in ("actor", "critic")}
        leaves["reference"] = jax.tree.leaves(job[0].frozen["reference"])[0]
        parked.append({role: is_parked(leaf) for role, leaf in leaves.items()})
        return generate(engine, *args, **named)

    monkeypatch.setattr(Engine, "generate", look)
    job: list[OnlineJob] = []
    for park, expected in (("all", {"actor", "critic", "reference"}), ("optimizer", {"actor", "critic"})):
        changes = {"parallel__park": park, "parallel__sampling_copy": "keep"}
        with OnlineJob(plan_on(tmp_path, 2, **sizes | changes), tmp_path / park) as made:
            job[:] = [made]
            train(made)
            found = jax.device_get({role: state.params for role, state in made.states.items()})
        assert all({role for role, there in moment.items() if there} == expected for moment in parked), parked
        parked.clear()
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(found), strict=True):
            np.testing.assert_array_equal(a, b)
    metrics = lines(tmp_path / "all" / "metrics.jsonl")[1]
    assert metrics["rollout/repartition_bytes"] > 0
    assert metrics["rollout/repartition_peak_bytes"] > 0


def test_minibatches_reach_every_row_in_an_order_of_seed_and_step(tmp_path: Path) -> None:
    plan = plan_on(tmp_path, 1, hyper__epochs=2, hyper__minibatches=3)
    drawn = list(minibatch_rows(plan, 5, plan.rows))
    assert [len(rows) for rows in drawn] == [2] * 6
    epochs = [[row for rows in drawn[i : i + 3] for row in rows.tolist()] for i in (0, 3)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert any(a.tolist() != b.tolist() for a, b in zip(drawn, minibatch_rows(plan, 6, plan.rows), strict=True))


def test_minibatches_hold_the_same_rows_on_any_number_of_devices(tmp_path: Path) -> None:
    changes = {"hyper__epochs": 2, "hyper__minibatches": 3, "train__micro_rows": 1}
    found = []
    for devices in (1, 8):
        plan = plan_on(tmp_path, devices, **changes)
        mover = Mover(plan, Hosts())
        rollout, rewards, placed = mover.place(six_rows(), np.arange(6.0))
        assert sorted(row for row in placed.source.tolist() if row >= 0) == list(range(6))
        np.testing.assert_array_equal(mover.own(rewards, placed), np.arange(6.0))
        np.testing.assert_array_equal(mover.own(rollout.sample_id, placed), np.arange(6) + 10)
        parts = [np.asarray(part.rows.sample_id) for part in mover.minibatches(rollout, placed, 5)]
        found.append([sorted(part[part > 0].tolist()) for part in parts])
    assert found[0] == found[1]
    assert [row - 10 for part in found[0][:3] for row in part] == [
        row for rows in list(minibatch_rows(plan, 5, plan.rows))[:3] for row in rows.tolist()
    ]


def six_rows() -> Rollout:
    """Rows of 1 to 6 tokens with sample ids 10 to 15."""
    segments = (np.arange(16)[None] <= np.arange(6)[:, None]).astype(np.int32)
    numbers = np.arange(6, dtype=np.int32)
    zeros: Any = np.zeros((6, 16), np.float32)
    inputs = Inputs(segments, segments, segments)  # pyright: ignore[reportArgumentType]
    return Rollout(inputs, zeros, zeros, zeros, numbers + 10, numbers, numbers, zeros[:, 0] > 0)  # pyright: ignore[reportArgumentType]


def test_a_run_directory_that_holds_a_run_is_kept(tmp_path: Path) -> None:
    run(tmp_path, checkpoint__keep=0)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    plan = plan_on(tmp_path, 1)
    with pytest.raises(InputError, match=r"holds a run of 2 steps; .*--overwrite"):
        OnlineJob(plan, tmp_path / "run", resume="never")
    plan = plan_on(tmp_path, 1, checkpoint__keep=0)
    with pytest.raises(InputError, match=r"holds a run of 2 steps, and no checkpoint to go on from; .*--overwrite"):
        OnlineJob(plan, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    with OnlineJob(plan, tmp_path / "run", overwrite=True):
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b""


def test_non_finite_updates_stop_the_run_and_keep_the_weights(tmp_path: Path) -> None:
    plan = plan_on(tmp_path, 1, train__max_skipped=2)
    with OnlineJob(plan, tmp_path / "run") as job:
        before = jax.device_get(job.states["actor"].params)
        job.programs = nan_advantages(job.programs)
        with pytest.raises(RunFailure, match=r"2 updates of the actor in a row .*max_skipped = 2"):
            train(job)
        assert int(job.states["actor"].skipped) == 2
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(job.states["actor"].params), strict=True):
            np.testing.assert_array_equal(a, b)


def nan_advantages(programs):
    import dataclasses

    def prepare(*args):
        batch, metrics = programs.prepare(*args)
        return dataclasses.replace(batch, advantages=batch.advantages * np.nan), metrics

    return dataclasses.replace(programs, prepare=prepare)


def test_a_failing_reward_names_its_sample_or_is_counted(tmp_path: Path) -> None:
    rewards = {"bad": {"fn": "tests.controller.tiny:fails_on_b"}}
    with pytest.raises(RewardError, match=r"prompts.jsonl:\d+"):
        run(tmp_path, rewards=rewards)
    run(tmp_path, "counted", rewards=rewards, reward_on_error="count")
    counted = lines(tmp_path / "counted" / "metrics.jsonl")[1]
    assert counted["rollout/reward_errors/bad"] > 0
    assert 0 < counted["rollout/reward_invalid"] < 1
    assert np.isfinite(counted["train/actor/loss"])


@pytest.mark.slow
def test_adaptive_kl_moves_its_coefficient(tmp_path: Path) -> None:
    run(tmp_path, hyper__kl__adaptive_target=1e-6, hyper__kl__adaptive_horizon=60.0, steps=3)
    coefficients = [m["rollout/kl_coef"] for m in lines(tmp_path / "run" / "metrics.jsonl")[1:]]
    # KL starts at 0, below the target, and is far above it after the first update; the clip is 20 % x 6 rows / 60.
    assert coefficients[1] == pytest.approx(0.05 * 0.98)
    assert coefficients[2] == pytest.approx(0.05 * 0.98 * 1.02)


@pytest.mark.slow
def test_target_kl_drops_the_rest_of_a_step_and_warmup_leaves_the_actor(tmp_path: Path) -> None:
    run(tmp_path, "free", hyper__epochs=4)
    run(tmp_path, "bound", hyper__epochs=4, hyper__target_kl=1e-9)
    run(tmp_path, "warm", hyper__epochs=4, hyper__critic_warmup_steps=1)
    steps = {n: lines(tmp_path / n / "metrics.jsonl")[1]["train/actor/updates"] for n in ("free", "bound", "warm")}
    # The first minibatch finds the policy unmoved, the second finds it moved.
    assert steps == {"free": 4, "bound": 2, "warm": 0}


def test_samples_of_a_group_differ_and_groups_without_signal_are_counted(tmp_path: Path) -> None:
    run(tmp_path, rollout__prompts=2, rollout__samples_per_prompt=3)
    samples = [s for s in lines(tmp_path / "run" / "samples.jsonl") if s["split"] == "train" and s["step"] == 1]
    assert [s["group"] for s in samples] == [0, 0, 0, 1, 1, 1]
    assert len({s["sample_id"] for s in samples}) == 6
    assert len({s["completion"] for s in samples}) > 3
    assert 0 <= lines(tmp_path / "run" / "metrics.jsonl")[1]["rollout/groups_without_signal"] <= 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hyper__minibatches": 4}, r"minibatches = 4 does not divide the 6 rows .*\[1, 2, 3, 6\]"),
        ({"parallel__train__tensor": 8}, r"parallel.train.tensor = 8 does not divide the model's heads = 4"),
        ({"parallel__train__fsdp": 3, "parallel__train__data": 1}, r"parallel.train: .* = 3 devices, and there are 8"),
        ({"data__max_prompt_tokens": 600}, r"= 606 is longer than the model's 512 positions"),
        ({"model__tokenizer": ""}, r"config.model.tokenizer is empty"),
        ({"rollout__cache_gib": 1e-6}, r"cache_gib = 1e-06: a row of 14 tokens needs 6.68e-06 GiB on each device"),
        ({"rollout__cache_gib": 1.0, "rollout__rows": 2}, r"cache_gib = 1.0 and rows = 2: set one of them"),
        ({"model__init__family": "lama"}, r"lama"),
        ({"model__path": "nowhere/at/all"}, r"nowhere/at/all"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_loads(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, InputError), match=words):
        make_plan(parse(tiny.config(tmp_path, **changes)))


def test_the_cache_decides_how_many_rows_are_sampled_at_a_time(tmp_path: Path) -> None:
    one = 2 * 2 * 2 * 14 * 16 * 4 / 2**30  # keys and values, layers, heads, tokens, size of a head, float32

    def rows(devices: int, gib: float, **changes: Any) -> int:
        split = {"parallel__train__data": devices, "parallel__rollout__data": devices}
        return plan_on(tmp_path, devices, rollout__cache_gib=gib, **split, **changes).sampled_rows

    assert [rows(1, one * n) for n in (1.0, 2.9, 5.0, 100.0)] == [1, 2, 5, 6]
    assert rows(2, one * 2.0) == 4
    assert rows(1, one * 2.0, rollout__cache_dtype="bfloat16") == 4


@pytest.mark.slow
def test_few_rows_at_a_time_give_the_same_samples(tmp_path: Path) -> None:
    run(tmp_path, "few", rollout__rows=2)
    run(tmp_path, "all")
    few, every = (lines(tmp_path / name / "samples.jsonl") for name in ("few", "all"))
    assert [s["completion"] for s in few] == [s["completion"] for s in every]


def test_rewards_begin_while_others_are_sampled_and_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With workers and few samples a call; here every call has been made when sampling returns."""
    rewards = {"share_of_a": {"fn": "tests.controller.tiny:share_of_a", "chunk": 1}}
    found = []
    for workers in (1, 2):
        split = {"parallel__train__data": 1, "parallel__rollout__data": 1}
        plan = plan_on(tmp_path, 1, rewards=rewards, reward_workers=workers, **split)
        begun: list[int] = []
        result = Scoring.result

        def spied(scoring: Scoring, begun: list[int] = begun, result: Any = result) -> Scores:
            begun.append(len(scoring._running))
            return result(scoring)

        monkeypatch.setattr(Scoring, "result", spied)
        with OnlineJob(plan, tmp_path / str(workers)) as job:
            _, samples, scores = job.collect(0)
            assert begun == [len(samples) if workers > 1 else 0]
            found.append(scores.total.tolist())
        monkeypatch.setattr(Scoring, "result", result)
    assert found[0] == found[1]
    assert len(set(found[0])) > 1


def test_the_dry_run_describes_the_run(tmp_path: Path) -> None:
    plan = tiny.plan(tiny.config(tmp_path, parallel__train__fsdp=4, parallel__rollout__tensor=2))
    text = plan.describe()
    assert '"fsdp": 4' in text
    assert f"{plan.models['actor'].parameter_count:,} parameters" in text
    assert "key-value cache (rollout)" in text
    assert "1 updates of 6 rows" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "tail", [{}, {"rollout__tail": "carry", "rollout__extra_prompts": 2, "rollout__max_staleness": 2}], ids=str
)
def test_nothing_compiles_after_the_second_step(tmp_path: Path, tail: dict[str, Any]) -> None:
    """Fifty steps of responses of all lengths, with evaluations, checkpoints and steps that come short of rows."""
    changes: dict[str, Any] = tail | {
        "steps": 50,
        "evaluation__every": 10,
        "checkpoint__every_steps": 1,  # the first one compiles how replicated arrays are cut
        "rollout__samples_per_prompt": 2,
        "rollout__sampling__max_new_tokens": 60,
        "rollout__sampling__top_p": 0.95,
        "hyper__minibatches": 2,
        "hyper__correction__how": "truncate",
        "train__micro_rows": 2,
        "actor_optimizer__lr": 1e-3,
    }
    plan = plan_on(tmp_path, 2, parallel__train__data=2, parallel__rollout__data=2, **changes)
    compiled: dict[int, int] = {}
    with compilations() as seen, OnlineJob(plan, tmp_path / "run") as job:
        write = job.write

        def counted(step: int) -> None:
            write(step)
            compiled[step] = seen.count(BACKEND)

        job.write = counted
        train(job)
    assert len({line["rollout/response_length"] for line in lines(tmp_path / "run" / "metrics.jsonl")[1:]}) > 25
    assert compiled[50] == compiled[2], compiled
