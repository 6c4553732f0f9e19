"""Every offline algorithm learns the digits task from its rows, in three seeds, and not from shuffled labels.

Models are from scratch; held-out rows are always true ones. The figures are in README.md.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
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


# Algorithm -> rows, how they are shuffled, the held-out figure, whether it is good when high, what it must reach and,
# with shuffled rows, not reach.
CASES: dict[str, tuple[str, Callable[[list[Record]], list[Record]], str, bool, float, float]] = {
    "sft": ("completions", lambda r: deal(r, ("completion",)), "nll", False, 0.1, 0.5),
    "dpo": ("pairs", toss, "accuracy", True, 0.9, 0.75),
    "simpo": ("pairs", toss, "accuracy", True, 0.9, 0.75),
    "orpo": ("pairs", toss, "accuracy", True, 0.9, 0.75),
    "kto": ("unpaired", lambda r: deal(r, ("label",)), "accuracy", True, 0.9, 0.75),
    "reward_model": ("pairs", toss, "accuracy", True, 0.9, 0.75),
    "reward_regression": ("ratings", lambda r: deal(r, ("label",)), "error_0", False, 0.15, 0.25),
    "reward_process": ("steps", toss_steps, "accuracy", True, 0.9, 0.75),
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
    _, _, figure, higher, reached, _ = CASES[name]
    start, end = last(tmp_path / "run", name, figure, seed=seed)
    assert (end >= reached > start) if higher else (end <= reached < start), (start, end)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["distill_teacher", "distill_topk"])
def test_distillation_learns_from_a_teacher(tmp_path: Path, name: str, seed: int) -> None:
    start, end = last(tmp_path / "run", name, "divergence", seed=seed)
    assert end <= 0.1 < 0.5 < start


@pytest.mark.parametrize("name", CASES)
def test_it_does_not_from_shuffled_labels(tmp_path: Path, name: str) -> None:
    rows, shuffle, figure, higher, _, bound = CASES[name]
    text = Path(f"configs/data/digits_{rows}_train.jsonl").read_text("utf-8")
    shuffled = shuffle([json.loads(line) for line in text.splitlines()])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in shuffled), "utf-8")
    start, end = last(tmp_path / "run", name, figure, data__train=(str(tmp_path / "rows.jsonl"),))
    assert end < bound if higher else end > bound, (start, end)
