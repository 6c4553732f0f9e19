"""Every algorithm on rows of data: each of its options changes its loss; and every algorithm has such a test."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import yatt_jax.algos
from tests.algos.sampled import ALGOS
from yatt_jax.algos import distill_teacher, distill_topk
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.chunks import Readout
from yatt_jax.types import (
    Inputs,
    LabelRows,
    Logprobs,
    PairRows,
    StepRows,
    TextRows,
    TokenScores,
    TopK,
    TopKRows,
    UnpairedRows,
)

NAMES = [
    "sft",
    "dpo",
    "simpo",
    "orpo",
    "kto",
    "reward_model",
    "reward_regression",
    "reward_process",
    "distill_teacher",
    "distill_topk",
]
ELSEWHERE = {"ppo", "spin", *ALGOS}  # test_ppo, test_spin, test_online_options

B, T, D, V = 3, 8, 4, 11
RNG = np.random.default_rng(0)
# Documents of 8; of 3 and 5, packed; and of 6 tokens, whose first two (one, where they are packed) are a prompt.
SEGMENTS = np.array([[1] * 8, [1] * 3 + [2] * 5, [1] * 6 + [0] * 2])
POSITIONS = np.array([[*range(8)], [*range(3), *range(5)], [*range(6), 0, 0]])
MASK = ((SEGMENTS > 0) & (POSITIONS > 1)).astype(np.float32)
TOKENS = jnp.asarray(RNG.integers(0, V, (B, T)))
PACKED = Inputs(TOKENS, jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS))
SINGLE = Inputs(TOKENS, jnp.broadcast_to(jnp.arange(T), (B, T)), jnp.ones((B, T), jnp.int32))
TWO: Inputs = jax.tree.map(lambda x: jnp.stack([x, x], axis=1), SINGLE)
SIDES = np.stack([np.arange(T) < np.array([[8], [5], [4]]), np.arange(T) < np.array([[4], [7], [8]])], 1) & (
    np.arange(T) > 1
)
ONE = jnp.ones(B)


def normal(*shape: int) -> jnp.ndarray:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


NEW = Logprobs(normal(B, 2, T) - 2, normal(B, 2, T) ** 2)
REFERENCE = jnp.asarray([[-9.0, -8.0], [-6.0, -11.0], [-3.0, -13.0]])
HIDDEN, MATRIX, TEACHER_HIDDEN, TEACHER = normal(B, T, D), normal(V, D), normal(B, T, D), normal(V, D)
SCORES = normal(B, T, 2)
STEPS = (np.arange(T) % 3 == 2) * np.ones((B, 1)) * (np.arange(T) < np.array([[8], [4], [7]]))
IDS = jnp.asarray(np.stack([RNG.permutation(V)[:4] for _ in range(B * T)]).reshape(B, T, 4))
STORED = TopK(jnp.asarray(-np.sort(-RNG.normal(size=(B, T, 4))), jnp.float32), IDS)

ROWS: dict[Any, Any] = {
    TextRows: TextRows(PACKED, jnp.asarray(MASK), ONE),
    PairRows: PairRows(TWO, jnp.asarray(SIDES, jnp.float32), jnp.asarray([0.5, 2.0, 1.0]), ONE),
    UnpairedRows: UnpairedRows(TWO, jnp.asarray(SIDES, jnp.float32), jnp.asarray([True, False, True]), ONE),
    LabelRows: LabelRows(SINGLE, normal(B, 2), jnp.ones((B, 2)), ONE),
    StepRows: StepRows(SINGLE, jnp.asarray(RNG.integers(0, 2, (B, T)), jnp.float32), jnp.asarray(STEPS), ONE),
    TopKRows: TopKRows(PACKED, jnp.asarray(MASK), STORED, jnp.full((B, T), 2.5), ONE),
}

AGGREGATIONS = [Aggregation(x) for x in ("token_mean", "sequence_mean", "sequence_sum")]
BY_LENGTH = [Aggregation("fixed_length", x) for x in (3, 5)]
PREFERENCES: dict[str, list[dict[str, Any]]] = {
    "beta": [{"beta": x} for x in (0.1, 0.5)],
    "length_average": [{"length_average": x} for x in (False, True)],
    "sft_coef": [{"sft_coef": x} for x in (0.0, 0.3, 1.0)],
}
TEXTS: dict[str, list[dict[str, Any]]] = {
    "aggregation.how": [{"aggregation": x} for x in [*AGGREGATIONS, BY_LENGTH[0]]],
    "aggregation.length": [{"aggregation": x} for x in BY_LENGTH],
}
DISTILLING = TEXTS | {
    "direction": [{"direction": x} for x in ("forward", "reverse")],
    "temperature": [{"temperature": x} for x in (1.0, 2.0)],
    "sft_coef": PREFERENCES["sft_coef"],
    "rest": [{"rest": x} for x in ("left_out", "one_entry")],
}
# Of each option, settings of which no two may give the same loss.
OPTIONS: dict[str, dict[str, list[dict[str, Any]]]] = {
    "sft": TEXTS,
    "dpo": PREFERENCES
    | {
        "loss": [{"loss": x} for x in ("dpo", "ipo", "rpo_squared", "rpo_backward_kl", "rpo_forward_kl")],
        "label_smoothing": [{"label_smoothing": x} for x in (0.0, 0.1)],
        "gap_scale": [{"loss": "rpo_squared", "gap_scale": x} for x in (1.0, 2.0)],
    },
    "simpo": PREFERENCES | {"gamma": [{"gamma": x} for x in (0.0, 0.5, 1.0)]},
    "orpo": PREFERENCES,
    "kto": PREFERENCES
    | {
        "desirable_weight": [{"desirable_weight": x} for x in (1.0, 1.5)],
        "undesirable_weight": [{"undesirable_weight": x} for x in (1.0, 0.5)],
    },
    "reward_model": {
        "loss": [{"loss": x} for x in ("plain", "margin", "scaled")],
        "center_coef": [{"center_coef": x} for x in (0.0, 0.1)],
    },
    "reward_regression": {
        "attributes": [{"attributes": 2}],  # the shape of the batch; the error is of the test below
        "attribute_weights": [{"attributes": 2, "attribute_weights": x} for x in ((), (1.0, 3.0), (0.0, 1.0))],
    },
    "reward_process": TEXTS,
    "distill_teacher": DISTILLING
    | {"rest": [{"k": 4, "rest": x} for x in ("left_out", "one_entry")], "k": [{"k": x} for x in (4, 64)]},
    "distill_topk": DISTILLING,
}


@functools.cache
def read_teacher(k: int) -> Any:
    """What distillation keeps of its teacher."""
    rows, hyper = ROWS[TextRows], distill_teacher.Hyper(k=k)
    return distill_teacher.read_teacher(TEACHER_HIDDEN, TEACHER, rows, hyper, Readout())


@functools.cache
def read_student(k: int) -> Any:
    """The student at the teacher's entries: the stored ones, or the largest k."""
    rows = ROWS[TopKRows]
    if k:
        rows = dataclasses.replace(rows, topk=read_teacher(k)[0])
    return distill_topk.READS["actor"](HIDDEN, MATRIX, rows, distill_topk.Hyper(), Readout())


def loss(name: str, hyper: Any) -> float:
    """The algorithm's loss on these rows."""
    algo: Any = importlib.import_module(f"yatt_jax.algos.{name}")
    rows = ROWS[algo.ROWS]
    scores = {"reference": REFERENCE, "actor": REFERENCE + jnp.asarray([[0.4, 1.2], [0.1, 0.7], [0.3, 0.2]])}
    if "teacher" in algo.scored_by(hyper):
        scores = {"teacher": read_teacher(hyper.k)}
    batch, _ = algo.prepare(rows, {role: scores[role] for role in algo.scored_by(hyper)}, hyper)
    if algo.TRAINS == ("reward",):
        two = algo.ROWS is PairRows
        found = TokenScores(jnp.stack([SCORES, SCORES[::-1]], axis=1) if two else SCORES)
    elif hasattr(algo, "READS"):
        found = read_student(getattr(hyper, "k", 0))
    else:
        found = NEW if algo.ROWS is PairRows else Logprobs(NEW.logprobs[:, 0], NEW.entropy[:, 0])
    (role,) = algo.TRAINS
    return float(algo.LOSSES[role](found, batch, hyper)[0].mean())


def fields_of(hyper: Any) -> set[str]:
    named = set()
    for field in dataclasses.fields(hyper):
        value = getattr(hyper, field.name)
        inner = dataclasses.fields(value) if dataclasses.is_dataclass(value) else []
        named |= {f"{field.name}.{f.name}" for f in inner} if inner else {field.name}
    return named


def test_every_algorithm_is_put_to_such_a_test() -> None:
    assert {module.name for module in pkgutil.iter_modules(yatt_jax.algos.__path__)} == {*NAMES, *ELSEWHERE}


@pytest.mark.parametrize("name", NAMES)
def test_every_option_changes_the_loss(name: str) -> None:
    algo: Any = importlib.import_module(f"yatt_jax.algos.{name}")
    assert fields_of(algo.Hyper()) == OPTIONS[name].keys()
    known: dict[Any, float] = {}
    for option, settings in OPTIONS[name].items():
        found = []
        for changes in settings:
            hyper = algo.Hyper(**changes)
            known[hyper] = known[hyper] if hyper in known else loss(name, hyper)
            found.append(known[hyper])
        assert np.all(np.isfinite(found)), option
        apart = [abs(a - b) for i, a in enumerate(found) for b in found[:i]]
        assert not apart or min(apart) > 1e-4, (option, found)


def test_attributes_are_the_outputs_of_the_model() -> None:
    algo: Any = importlib.import_module("yatt_jax.algos.reward_regression")
    assert [algo.labels(algo.Hyper(attributes=n)) for n in (1, 2)] == [1, 2]
    with pytest.raises(ValueError, match=r"attribute_weights has 1 numbers for attributes = 2"):
        algo.Hyper(attributes=2, attribute_weights=(1.0,))
