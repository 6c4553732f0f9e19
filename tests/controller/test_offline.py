"""Whole runs of the offline loop: what they write, what does not change them, how they go on, what they refuse."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.controller.offline_tiny import STEADY, plan, run
from yatt_jax.config import ConfigError
from yatt_jax.controller.job import STOPPED_EARLY
from yatt_jax.controller.offline import train
from yatt_jax.controller.offline_evaluate import evaluate, mean_and_interval
from yatt_jax.controller.offline_job import OfflineJob
from yatt_jax.errors import InputError, RunFailure

EVERY = ["dpo", "distill_teacher", "kto", "orpo", "reward_model", "reward_process", "reward_regression", "sft", "simpo"]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def check_same(one: Any, other: Any, *, exact: bool = True) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0 if exact else 1e-5)


def test_a_run_writes_everything_it_promises(tmp_path: Path) -> None:
    run(tmp_path / "run", "sft")
    metrics = lines(tmp_path / "run")
    assert [m["step"] for m in metrics] == [0, 1, 2, 3]
    assert {"eval/loss", "eval/loss_ci95", "eval/nll"} <= metrics[0].keys()
    for name in ("data/epoch", "data/padding", "data/trained", "data/tokens_per_second", "train/actor/grad_norm"):
        assert name in metrics[1], name
    assert "eval/loss" not in metrics[1]
    assert metrics[3]["eval/loss"] < metrics[0]["eval/loss"] - metrics[0]["eval/loss_ci95"]
    assert metrics[1]["data/rows"] == 32  # records, though they are packed
    assert metrics[3]["data/epoch"] == pytest.approx(0.3)
    assert "<svg" in (tmp_path / "run" / "report.html").read_text("utf-8")
    assert json.loads((tmp_path / "run" / "export" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]


def test_a_reward_model_is_written_as_a_sequence_classifier_and_read_again(tmp_path: Path) -> None:
    run(tmp_path / "run", "reward_model")
    export = tmp_path / "run" / "export"
    assert json.loads((export / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    ended = lines(tmp_path / "run")[-1]
    # The held-out rows get the same rewards from the folder as from the run.
    run(tmp_path / "again", "reward_model", model__path=str(export), steps=1, report__export=False)
    for name in ("loss", "accuracy", "reward_chosen", "reward_rejected"):
        assert lines(tmp_path / "again")[0][f"eval/{name}"] == pytest.approx(ended[f"eval/{name}"], abs=1e-5)


@pytest.mark.slow
def test_transformers_says_the_same_of_the_exported_models(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    def read(name: str, kind: Any, rows: str) -> tuple[Any, Callable[[str], Any], list[dict[str, Any]], dict[str, Any]]:
        run(tmp_path / name, name)
        tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / name / "export")
        text = Path(f"configs/data/digits_{rows}_eval.jsonl").read_text("utf-8")
        ids = lambda text: torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])  # noqa: E731
        model = kind.from_pretrained(tmp_path / name / "export", dtype=torch.float32).eval()
        return model, ids, [json.loads(line) for line in text.splitlines()], lines(tmp_path / name)[-1]

    model, ids, records, metrics = read("sft", AutoModelForCausalLM, "completions")
    nll = []
    for record in records:
        row = ids(record["prompt"] + record["completion"])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(row).logits, -1)[0, :-1].gather(-1, row[0, 1:, None])[:, 0]
        nll.append(-logprobs[len(record["prompt"]) - 1 :])
    assert float(torch.cat(nll).mean()) == pytest.approx(metrics["eval/nll"], abs=1e-5)

    model, ids, records, metrics = read("reward_model", AutoModelForSequenceClassification, "pairs")
    model.config.pad_token_id = None  # it is the end token here, and transformers looks for the last that is no padding
    with torch.no_grad():
        rewards = [
            [float(model(ids(r["prompt"] + r[side])).logits) for side in ("chosen", "rejected")] for r in records
        ]
    apart = torch.tensor(rewards)[:, 0] - torch.tensor(rewards)[:, 1]
    assert float(-torch.nn.functional.logsigmoid(apart).mean()) == pytest.approx(metrics["eval/loss"], abs=1e-5)
    assert float((apart > 0).float().mean()) == pytest.approx(metrics["eval/accuracy"], abs=1e-6)


def test_before_the_first_update_the_policy_is_the_reference(tmp_path: Path) -> None:
    run(tmp_path / "run", "dpo", steps=1, report__export=False)
    start = lines(tmp_path / "run")[0]
    assert start["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert start["eval/margin"] == pytest.approx(0, abs=1e-6)


def test_every_held_out_row_counts_once(tmp_path: Path) -> None:
    found = []
    for batch, rows in ((5, 0), (64, 0), (64, 7)):
        changes: dict[str, Any] = {"data__batch": batch, "evaluation__rows": rows, "steps": 1, "report__export": False}
        folder = tmp_path / f"{batch} {rows}"
        with OfflineJob(plan("sft", **changes, data__pack=0), folder) as job:
            evaluate(job, 0)
            job.write(0)
        found.append(lines(folder)[0])
    assert found[0]["eval/loss"] == pytest.approx(found[1]["eval/loss"], abs=1e-5)
    assert found[0]["eval/loss_ci95"] == pytest.approx(found[1]["eval/loss_ci95"], abs=1e-5)
    assert abs(found[1]["eval/loss"] - found[2]["eval/loss"]) > 1e-3


def test_the_interval_of_a_ratio() -> None:
    # Equal weights: the mean of 1, 2, 3, 6 and 1.96 standard errors, sqrt(14 / 3 / 4).
    mean, half = mean_and_interval(np.array([1.0, 2, 3, 6, 9]), np.array([1.0, 1, 1, 1, 0]))
    assert mean == 3
    assert half == pytest.approx(1.96 * math.sqrt(14 / 3 / 4))
    # Weights that follow the totals leave nothing uncertain.
    assert mean_and_interval(np.array([2.0, 4]), np.array([1.0, 2])) == (2.0, 0.0)
    assert all(map(math.isnan, mean_and_interval(np.zeros(2), np.zeros(2))))
    # Against the spread of means of resampled rows.
    dice = np.random.default_rng(0)
    weight = dice.uniform(1, 3, 400)
    total = weight * dice.normal(1, 1, 400)
    drawn = dice.integers(0, 400, (4000, 400))
    means = total[drawn].sum(1) / weight[drawn].sum(1)
    assert mean_and_interval(total, weight)[1] == pytest.approx(1.96 * means.std(), rel=0.05)


# Packing, micro-batches, devices.


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SFT on one device, one micro-batch, one record a row."""
    return run(tmp_path_factory.mktemp("plain") / "run", "sft", **PLAIN)


PLAIN: dict[str, Any] = STEADY | {"data__pack": 0, "data__batch": 12, "report__export": False, "evaluation__every": 0}


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (8, {"parallel__train__fsdp": 2, "parallel__train__tensor": 2, "train__micro_rows": 2, "data__pack": 48}),
        pytest.param(1, {"data__pack": 48, "train__micro_rows": 3}, marks=pytest.mark.slow),
        pytest.param(1, {"train__micro_rows": 5}, marks=pytest.mark.slow),
        pytest.param(1, {"train__micro_tokens": 70}, marks=pytest.mark.slow),
        pytest.param(8, {"data__pack": 40}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_how_rows_are_laid_out_changes_nothing(
    tmp_path: Path, plain: Any, devices: int, changes: dict[str, Any]
) -> None:
    check_same(plain, run(tmp_path / "run", "sft", devices, "tiny", **PLAIN | changes), exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_the_same_parameters_on_any_devices(tmp_path: Path, name: str) -> None:
    changes: dict[str, Any] = STEADY | {"data__batch": 12, "report__export": False}
    one = run(tmp_path / "one", name, **changes)
    sizes: dict[str, Any] = {"parallel__train__fsdp": 2, "parallel__train__tensor": 2, "train__micro_rows": 2}
    check_same(one, run(tmp_path / "eight", name, 8, **changes | sizes), exact=False)
    for a, b in zip(lines(tmp_path / "one"), lines(tmp_path / "eight"), strict=True):
        # At the start chosen and rejected are alike, and which one leads is rounding.
        passed = ("padding", "tokens_per_second", *(("accuracy", "accuracy_ci95") if a["step"] == 0 else ()))
        for key in a:
            if key.startswith(("eval/", "data/")) and not key.endswith(passed):
                assert a[key] == pytest.approx(b[key], abs=2e-4), key


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_config_runs(tmp_path: Path, name: str) -> None:
    run(tmp_path / "run", name)
    metrics = lines(tmp_path / "run")
    assert len(metrics) == 4
    assert all(math.isfinite(value) for line in metrics for key, value in line.items() if key.endswith("/loss"))
    assert metrics[3]["eval/loss"] < metrics[0]["eval/loss"]


# Going on.

LONGER: dict[str, Any] = {"steps": 5, "checkpoint__every_steps": 2, "evaluation__every": 2, "report__export": False}


class Crash(Exception):
    """Stands for the end of the process."""


def go(folder: Path, name: str, at: Callable[[OfflineJob], None] | None = None, **changes: Any) -> tuple[Any, int]:
    """Starts the run, or goes on with it; ``at`` may tamper with the job."""
    with OfflineJob(plan(name, **STEADY | LONGER | changes), folder) as job:
        if at is not None:
            at(job)
        with job.stoppable():
            train(job)
        return jax.device_get(job.states), job.status


def at_call(method: str, number: int, act: Callable[[], None]) -> Callable[[OfflineJob], None]:
    def tamper(job: OfflineJob) -> None:
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


def timeless(folder: Path) -> list[dict[str, Any]]:
    clocks = ("time/", "checkpoint/", "data/tokens_per_second")
    return [{key: value for key, value in line.items() if not key.startswith(clocks)} for line in lines(folder)]


# The 320 rows are 2 steps of the larger batch, so that the reference's scores are looked up from the third step on.
@pytest.mark.parametrize(
    ("name", "batch"),
    [("sft", 32), *(pytest.param(name, 160, marks=pytest.mark.slow) for name in ("dpo", "kto"))],
)
def test_a_run_that_stopped_twice_is_the_run_that_never_did(tmp_path: Path, name: str, batch: int) -> None:
    whole, _ = go(tmp_path / "whole", name, data__batch=batch)
    with pytest.raises(Crash):
        go(tmp_path / "run", name, at_call("report", 3, crash), data__batch=batch)
    _, status = go(tmp_path / "run", name, at_call("draw", 2, tell), data__batch=batch)
    assert status == STOPPED_EARLY
    state, status = go(tmp_path / "run", name, data__batch=batch)
    assert status == 0
    check_same(whole, state)
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_the_reference_is_asked_once_for_each_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked: list[bool] = []

    def count(job: OfflineJob) -> None:
        score = job.programs.score["reference"]
        counted = lambda *given: asked.append(job._held_out) or score(*given)  # noqa: E731
        monkeypatch.setitem(job.programs.score, "reference", counted)

    changes: dict[str, Any] = {"data__batch": 160, "checkpoint__keep": 0, "evaluation__rows": 20}
    kept, _ = go(tmp_path / "kept", name, count, **changes)
    assert asked.count(True) == 1  # of four evaluations
    assert asked.count(False) == 2  # of five steps, two an epoch
    monkeypatch.setattr(OfflineJob, "_open_kept", lambda job: {})
    again, _ = go(tmp_path / "again", name, count, **changes)
    assert len(asked) == 3 + 9
    check_same(kept, again, exact=False)


def test_what_a_run_may_not_go_on_with(tmp_path: Path) -> None:
    go(tmp_path, "sft", steps=2)
    for key, value in {"data__batch": 16, "data__last": "drop", "seed": 1, "optimizer__name": "sgd"}.items():
        with pytest.raises(InputError, match=r"cannot go on .*\nconfig\." + key.replace("__", r"\.")):
            go(tmp_path, "sft", **{key: value})


def test_the_best_checkpoint_and_early_stop(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"checkpoint__best_metric": "eval/loss", "checkpoint__best_mode": "min", "steps": 30}
    go(tmp_path, "sft", **changes, checkpoint__early_stop_patience=1, evaluation__every=1, optimizer__lr=0.0)
    assert max(line["step"] for line in lines(tmp_path)) == 2


# What is refused, or counted.


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "sft",
            {"train__micro_tokens": 8},
            r"train.micro_tokens = 8: the longest possible row needs at least 64 \(1 x",
        ),
        ("dpo", {"train__micro_tokens": 40}, r"needs at least 64 \(2 x data.max_tokens"),
        ("sft", {"data__max_tokens": 600, "data__pack": 600}, r"config.data.max_tokens = 600 is longer than .* 512"),
        ("sft", {"parallel__train__tensor": 8}, r"parallel.train.tensor = 8 does not divide the model's heads = 4"),
        ("sft", {"model__tokenizer": ""}, r"config.model.tokenizer is empty"),
        ("distill_teacher", {"model__teacher": ""}, r"config.model.teacher is empty"),
        ("dpo", {"hyper__label_smoothing": 0.1, "hyper__loss": "ipo"}, r"label_smoothing = 0.1: needs loss = 'dpo'"),
        (
            "reward_regression",
            {"hyper__attribute_weights": (1.0,)},
            r"attribute_weights has 1 numbers for attributes = 2",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_anything_loads(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, InputError), match=words):
        plan(name, 8, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "reward_regression",
            {"hyper__attributes": 9},
            r"attributes = 9: the labels in config.data.train have 2 numbers",
        ),
        ("sft", {"data__train": ("configs/data/digits_pairs_train.jsonl",)}, r"digits_pairs_train.jsonl:1"),
        ("reward_model", {"data__pack": 64}, r"data.pack = 64: PairRows are not packed"),
        ("kto", {"data__learn": "all"}, r"data.learn = 'all' is for texts to imitate"),
        ("sft", {"data__train": ("nowhere.jsonl",)}, r"nowhere.jsonl"),
        (
            "sft",
            {"checkpoint__best_metric": "eval/los", "checkpoint__keep_best": 1},
            r"best_metric = 'eval/los' \(did you mean 'eval/loss'\?\)",
        ),
        (
            "dpo",
            {"checkpoint__best_metric": "eval/accuracy", "checkpoint__keep_best": 1, "data__eval": ()},
            r"best_metric needs held-out rows",
        ),
    ],
)
def test_what_the_data_does_not_allow_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        OfflineJob(plan(name, **changes), tmp_path / "run")


def test_the_data_must_say_by_how_much_where_the_loss_reads_it(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "123", "chosen": "4", "rejected": "5"}\n' * 4)
    changes: dict[str, Any] = {"data__train": (str(tmp_path / "pairs.jsonl"),), "hyper__loss": "rpo_squared"}
    with pytest.raises(InputError, match=r"pairs.jsonl:1: the loss reads by how much"):
        OfflineJob(plan("dpo", **changes), tmp_path / "run")


def test_rows_that_are_left_out_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "123", "completion": "4" * n} for n in (1, 2, 3, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes: dict[str, Any] = {"data__train": (str(tmp_path / "rows.jsonl"),), "data__batch": 4, "data__pack": 0}
    run(tmp_path / "run", "sft", steps=2, report__export=False, **changes)
    found = [(line["data/skipped/overlong"], line["data/rows"]) for line in lines(tmp_path / "run")[1:]]
    assert found == [(1, 3), (2, 3)]


def test_non_finite_updates_stop_the_run_and_keep_the_weights(tmp_path: Path) -> None:
    with OfflineJob(plan("dpo", train__max_skipped=2), tmp_path / "run") as job:
        before = jax.device_get(job.states["actor"].params)
        job.score = lambda role, rows: jax.numpy.full((*rows.weight.shape, 2), np.nan)  # type: ignore[method-assign]
        with pytest.raises(RunFailure, match=r"2 updates of the actor in a row .*max_skipped = 2"):
            train(job)
        check_same(before, job.states["actor"].params)


def test_the_dry_run_describes_the_run() -> None:
    text = plan("dpo", 8, parallel__train__fsdp=4).describe()
    assert '"fsdp": 4' in text
    assert "32 records as PairRows, 2 x of up to 32 tokens each" in text
    assert "reference" in text
