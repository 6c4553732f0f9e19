"""Held-out evaluation of runs that sample: several responses to a prompt, votes, and the reference as an opponent."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.controller import tiny
from tests.controller.test_run import lines, run
from tests.processes import run_processes
from yatt_jax.config import ConfigError, parse
from yatt_jax.errors import InputError
from yatt_jax.types import Sample

SEVERAL: dict[str, Any] = {
    "data__holdout": 6,
    "evaluation__samples": 3,
    "evaluation__right_from": 0.2,
    "evaluation__vote": "tests.controller.test_evaluate:last_letter",
    "evaluation__win_rate": True,
    "evaluation__every": 1,
    "hyper__kl__place": "none",
    "report__export": False,
    "steps": 3,
}


def last_letter(samples: list[Sample]) -> list[str | None]:
    """What a completion ends with."""
    return [sample.completion[-1:] or None for sample in samples]


def interval(values: list[float]) -> tuple[float, float]:
    return float(np.mean(values)), 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def by_prompt(folder: Path, step: int) -> list[list[Any]]:
    """The held-out records of a step, by prompt."""
    found: dict[int, list[Any]] = {}
    for file in (folder / "run").glob("samples*.jsonl"):
        for record in lines(file):
            if (record["step"], record["split"]) == (step, "eval"):
                found.setdefault(record["prompt_index"], []).append(record)
    return [sorted(records, key=lambda r: r["sample_id"]) for _, records in sorted(found.items())]


def expected(folder: Path, step: int) -> dict[str, float]:
    """The figures of a step, worked out from the samples that it wrote."""
    groups, start = by_prompt(folder, step), by_prompt(folder, 0)
    assert [len(group) for group in groups] == [3] * 6
    rewards = np.array([[record["total"] for record in group] for group in groups])
    figures = {"reward": rewards.mean(axis=1).tolist()}
    for k in (1, 2, 3):
        choices = [list(itertools.combinations(row >= 0.2, k)) for row in rewards]
        figures[f"pass@{k}"] = [float(np.mean([any(choice) for choice in row])) for row in choices]
    figures["maj@3"] = []
    for group in groups:
        answers = Counter(record["completion"][-1:] for record in group if record["completion"])
        most = max(answers.values(), default=0)
        marks = [
            np.mean([r["total"] >= 0.2 for r in group if r["completion"][-1:] == answer])
            for answer, count in answers.items()
            if count == most
        ]
        figures["maj@3"].append(float(np.mean(marks)) if marks else 0.0)
    before = np.array([[record["total"] for record in group] for group in start])
    pairs = (rewards[:, :, None] > before[:, None, :]) + 0.5 * (rewards[:, :, None] == before[:, None, :])
    figures["win_rate"] = pairs.mean(axis=(1, 2)).tolist()
    found = {}
    for name, values in figures.items():
        found[f"eval/{name}"], found[f"eval/{name}_ci95"] = interval(values)
    return found


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    run(folder, actor_optimizer__lr=0.05, critic_optimizer__lr=0.05, **SEVERAL)
    return folder


def test_figures_of_prompts(several: Path) -> None:
    metrics = lines(several / "run" / "metrics.jsonl")
    for step in (0, 3):
        values = expected(several, step)
        for name, value in values.items():
            assert metrics[step][name] == pytest.approx(value, abs=1e-5), name
    assert metrics[0]["eval/win_rate"] == 0.5  # the policy is still the reference
    assert metrics[0]["eval/win_rate_ci95"] == 0
    assert metrics[3]["eval/win_rate_ci95"] > 0
    assert abs(metrics[3]["eval/win_rate"] - 0.5) > 0.01


@pytest.mark.slow
def test_the_same_figures_for_two_processes(tmp_path: Path) -> None:
    rates: dict[str, Any] = {"actor_optimizer__lr": 1e-3, "critic_optimizer__lr": 1e-3}
    run(tmp_path, **SEVERAL | rates)
    alone = lines(tmp_path / "run" / "metrics.jsonl")
    (tmp_path / "two").mkdir()
    spec = json.dumps({"folder": str(tmp_path / "two"), "changes": SEVERAL | rates})
    run_processes(["tests/controller/job_process.py"], 2, 1, timeout=300, env={"YATT_TEST_JOB": spec})
    for one, two in zip(alone, lines(tmp_path / "two" / "run" / "metrics.jsonl"), strict=True):
        figures = [name for name in one if name.startswith("eval/")]
        assert len(figures) > 12
        for name in figures:
            assert two[name] == pytest.approx(one[name], abs=1e-6), name


@pytest.mark.slow
def test_a_run_stops_where_its_win_rate_no_longer_improves(tmp_path: Path) -> None:
    early: dict[str, Any] = {"checkpoint__best_metric": "eval/win_rate", "checkpoint__early_stop_patience": 1}
    run(tmp_path, **SEVERAL | early | {"steps": 30, "actor_optimizer__lr": 0.0})
    assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 2  # the first value is the best


@pytest.mark.slow
def test_an_opponent_of_other_sizes(tmp_path: Path) -> None:
    """The teacher of the digits task knows the answers, and the policy does not."""
    changes: dict[str, Any] = {
        "algo": "grpo",
        "model__tokenizer": "configs/data/digits_teacher",
        "model__reference": "configs/data/digits_teacher",
        "data__train": ("configs/data/digits_train.jsonl",),
        "rewards": {"digits": {"fn": "yatt_jax.rewards.rules:digits"}},
        "rollout__samples_per_prompt": 2,
        "rollout__sampling__max_new_tokens": 10,
        "evaluation__win_rate": True,
        "steps": 1,
        "report__export": False,
    }
    run(tmp_path, **changes)
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["eval/win_rate"] < 0.4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation__samples": 0}, "samples = 0: must be at least 1"),
        ({"evaluation__vote": "here"}, "vote = 'here': expected an import path"),
        ({"evaluation__samples": 1}, "vote = 'tests.*letter': needs samples above 1"),
        ({"evaluation__samples": 1, "evaluation__vote": ""}, "right_from = 0.2: needs samples above 1"),
        ({"evaluation__temperature": 0.0}, r"samples = 3 with temperature = 0 \(greedy\): all of them"),
    ],
)
def test_faults_name_the_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(tiny.config(tmp_path, **SEVERAL | changes))


def test_the_best_metric_is_one_that_is_measured(tmp_path: Path) -> None:
    best: dict[str, Any] = {"checkpoint__early_stop_patience": 1}
    for name in ("eval/pass@2", "eval/maj@3", "eval/win_rate"):
        tiny.plan(tiny.config(tmp_path, **SEVERAL | best, checkpoint__best_metric=name))
    with pytest.raises(ConfigError, match=r"eval/pass@4.*expected one of"):
        tiny.plan(tiny.config(tmp_path, **SEVERAL | best, checkpoint__best_metric="eval/pass@4"))


def test_a_vote_that_does_not_exist(tmp_path: Path) -> None:
    from yatt_jax.controller.hosts import Hosts
    from yatt_jax.controller.inputs import open_inputs

    plan = tiny.plan(tiny.config(tmp_path, **SEVERAL | {"evaluation__vote": "yatt_jax.rewards.votes:numbre"}))
    with pytest.raises(InputError, match=r"config.evaluation.vote = .*has no 'numbre' \(did you mean 'number'"):
        open_inputs(plan, Hosts())
