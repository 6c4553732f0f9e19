"""Every offline algorithm learns the digits task from its rows, in three seeds, and not from shuffled labels.

Models are from scratch; held-out rows are always true ones. The figures are in README.md.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.controller.offline_tiny import run

pytestmark = pytest.mark.slow

Record = dict[str, Any]


def deal(records: list[Record], names: tuple[str, ...]) -> list[Record]:
    """Gives each record the fields of another one."""
    others = random.Random(0).sample(records, len(records))
    return [record | {name: other[name] for name in names} for record, other in zip(records, others, strict=True)]


def toss(records: list[Record]) -> list[Record]:
    """Turns half of the preferences round."""
    dice = random.Random(0)
    swapped = [{"chosen": r["rejected"], "rejected": r["chosen"]} if dice.random() < 0.5 else {} for r in records]
    plain = [{"prompt": r["prompt"], "chosen": r["chosen"], "rejected": r["rejected"]} for r in records]
    return [record | turned for record, turned in zip(plain, swapped, strict=True)]


def toss_steps(records: list[Record]) -> list[Record]:
    """Judges each step by a coin."""
    dice = random.Random(0)
    return [record | {"labels": [dice.random() < 0.5 for _ in record["labels"]]} for record in records]


@dataclasses.dataclass(frozen=True)
class Case:
    """How an algorithm is put to the test.

    Attributes:
      rows: which of the files.
      shuffle: takes the sense out of their labels.
      figure: the held-out figure.
      reached: what it gets to.
      bound: what it does not get to with shuffled labels; better figures are on the side of ``reached``.
      shuffled: changes of the config with these.
    """

    rows: str
    shuffle: Callable[[list[Record]], list[Record]]
    figure: str
    reached: float
    bound: float
    shuffled: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def at_least(self, value: float, mark: float) -> bool:
        """Whether a value is as good as a mark."""
        return value >= mark if self.reached > self.bound else value <= mark


CASES = {
    "sft": Case("completions", lambda rows: deal(rows, ("completion",)), "nll", 0.05, 0.15),
    "dpo": Case("pairs", toss, "accuracy", 0.9, 0.75),
    "simpo": Case("pairs", toss, "accuracy", 0.9, 0.75),
    # Without the likelihood: half of the chosen responses are right ones still, and they are what imitation learns.
    "orpo": Case("pairs", toss, "accuracy", 0.9, 0.75, {"hyper__sft_coef": 0.0}),
    "kto": Case("unpaired", lambda rows: deal(rows, ("label",)), "accuracy", 0.85, 0.7),
    "reward_model": Case("pairs", toss, "accuracy", 0.9, 0.75),
    "reward_regression": Case("ratings", lambda rows: deal(rows, ("label",)), "error_0", 0.22, 0.3),
    "reward_process": Case("steps", toss_steps, "accuracy", 0.85, 0.7),
}


def last(folder: Path, name: str, figure: str, **changes: Any) -> tuple[float, float]:
    """The held-out figure at the start and at the end."""
    run(folder, name, variant="" if name == "distill_topk" else "small", report__export=False, **changes)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    found = [line[f"eval/{figure}"] for line in lines if f"eval/{figure}" in line]
    return found[0], found[-1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_it_learns(tmp_path: Path, name: str, seed: int) -> None:
    case = CASES[name]
    start, end = last(tmp_path / "run", name, case.figure, seed=seed)
    assert case.at_least(end, case.reached), (start, end)
    assert not case.at_least(start, case.bound), (start, end)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["distill_teacher", "distill_topk"])
def test_distillation_learns_from_a_teacher(tmp_path: Path, name: str, seed: int) -> None:
    start, end = last(tmp_path / "run", name, "divergence", seed=seed)
    assert end <= 0.1 < 0.5 < start


@pytest.mark.parametrize("name", CASES)
def test_it_does_not_from_shuffled_labels(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    text = Path(f"configs/data/digits_{case.rows}_train.jsonl").read_text("utf-8")
    shuffled = case.shuffle([json.loads(line) for line in text.splitlines()])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in shuffled), "utf-8")
    changes: dict[str, Any] = {"data__train": (str(tmp_path / "rows.jsonl"),), **case.shuffled}
    start, end = last(tmp_path / "run", name, case.figure, **changes)
    assert not case.at_least(end, case.bound), (start, end)
