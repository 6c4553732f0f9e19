"""Rewards by prompt, on one scale, and rewards that are opened."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from yatt_jax.controller.figures import reward_sums
from yatt_jax.errors import InputError
from yatt_jax.rewards import RewardError, RewardSpec, build


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def spec(name: str, **settings) -> RewardSpec:
    return RewardSpec(f"reward_functions:{name}", **settings)


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_column_says_which_rewards_a_prompt_asks_for(sample, chunk):
    specs = {"size": spec("size", weight=0.5, chunk=chunk), "fixed": spec("truths", weight=2.0, chunk=chunk)}
    samples = [
        sample("abc", task="size"),
        sample("a", task=["fixed"]),
        sample("abcd", task=["size", "fixed"]),
        sample("abcdef", task={"size": 3.0, "fixed": None}),
        sample("abc", task={"size": 0.0, "fixed": 1}),
    ]
    scores = build(specs, column="task")(samples)
    nan = np.nan
    np.testing.assert_array_equal(scores.rewards["size"], [3, nan, 4, 6, 3])
    np.testing.assert_array_equal(np.isnan(scores.rewards["fixed"]), [True, False, False, True, False])
    fixed = scores.rewards["fixed"]
    np.testing.assert_allclose(scores.total, [1.5, 2 * fixed[1], 2 + 2 * fixed[2], 18, fixed[4]])
    assert scores.invalid == {"size": 0, "fixed": 0}


def test_functions_see_only_the_samples_that_ask_for_them(sample):
    """So a reward that needs a gold answer can stand beside one that needs none."""
    specs = {"right": RewardSpec("yatt_jax.rewards.rules:exact_match"), "size": spec("size")}
    scores = build(specs, column="task")([sample("a", task="right", answer="a"), sample("bc", task="size")])
    assert scores.total.tolist() == [1.0, 2.0]
    means = reward_sums(scores, [sample("a"), sample("bc")])
    assert means["reward/right"] == (1.0, 1)
    assert means["reward/size"] == (2.0, 1)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, r'p\.jsonl:1: field "task" is missing, and reward_column .*\[\'size\'\]'),
        ({"task": "sise"}, r"no reward 'sise' \(did you mean 'size'\?\)"),
        ({"task": []}, "names no reward"),
        ({"task": {"size": None}}, "names no reward"),
        ({"task": 3}, "expected a reward's name, a list of names, or weights, found 3"),
        ({"task": {"size": "1"}}, "expected a finite number for each reward"),
        ({"task": {"size": float("nan")}}, "expected a finite number for each reward"),
    ],
)
def test_choices_that_cannot_be_followed(sample, columns, message):
    with pytest.raises(InputError, match=message):
        build({"size": spec("size")}, column="task", on_error="count")([sample("a", **columns)])


def test_values_are_normalised_before_they_are_weighted(sample):
    """With the moments of reference samples, these have mean 0 and deviation 1."""
    reference = [sample("x" * n) for n in (2, 4, 9)]
    sizes = np.array([2.0, 4.0, 9.0])
    moments = {"mean": float(sizes.mean()), "std": float(sizes.std())}
    scores = build({"size": spec("size", weight=3.0, **moments)})(reference)
    assert scores.rewards["size"].tolist() == [2, 4, 9]
    np.testing.assert_allclose(scores.total, 3 * (sizes - sizes.mean()) / sizes.std(), rtol=1e-6)
    for bad in ({"std": 0.0}, {"std": float("inf")}, {"mean": float("nan")}):
        with pytest.raises(ValueError, match="must be"):
            spec("size", **bad)


def test_failures_of_single_samples(sample):
    samples = [sample("good"), sample("bad"), sample("good")]
    with pytest.raises(RewardError, match=r"failed: no power\n  sample 1 ") as caught:
        build({"r": spec("fails_softly")})(samples)
    assert caught.value.sample is samples[1]
    scores = build({"r": spec("fails_softly")}, on_error="count")(samples)
    np.testing.assert_array_equal(scores.total, [1, np.nan, 1])
    assert (scores.errors, scores.invalid, scores.reasons) == ({"r": 1}, {"r": 0}, {"r: no power": 1})


def test_settings_are_opened_and_closed(sample):
    scorer = build({"r": spec("Settings", kwargs={"scale": 2})})
    scores = scorer([sample("abc"), sample("a")])
    assert scores.total.tolist() == [6, 2]
    assert scores.counts == {"r/asked": 2}
    assert reward_sums(scores, [sample("abc"), sample("a")])["reward_counts/r/asked"] == (2.0, None)
    assert scorer([sample("a")]).counts == {"r/asked": 1}
    assert scorer([]).counts == {"r/asked": 0}
    scorer.close()
    (opened,) = sys.modules["reward_functions"].opened
    assert opened.scale == 2.0
    with pytest.raises(InputError, match=r"rewards\.r\.kwargs: scale = -1\.0: must not be negative"):
        build({"r": spec("Settings", kwargs={"scale": -1.0})})
    with pytest.raises(InputError, match=r"rewards\.r\.kwargs\.scale = 'big': expected float"):
        build({"r": spec("Settings", kwargs={"scale": "big"})})
    with pytest.raises(InputError, match=r"needs a method open\(\)"):
        build({"r": spec("NotOpened")})
