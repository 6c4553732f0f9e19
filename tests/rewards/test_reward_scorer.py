"""Resolving, running and mixing rewards."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from yatt_jax.errors import InputError
from yatt_jax.rewards import RewardError, RewardSpec, build


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def spec(name: str, **settings) -> RewardSpec:
    return RewardSpec(f"reward_functions:{name}", **settings)


def test_weighted_sum_in_float32(sample):
    scorer = build({"size": spec("size", weight=0.5, kwargs={"scale": 0.1}), "ids": spec("arrays", weight=-2.0)})
    scores = scorer([sample("abc"), sample("abcdefg")])
    assert scorer.names == ["size", "ids"]
    np.testing.assert_allclose(scores.rewards["size"], [0.3, 0.7], rtol=1e-6)
    np.testing.assert_allclose(scores.rewards["ids"], [0, 1])
    np.testing.assert_allclose(scores.total, [0.15, 0.35 - 2], rtol=1e-6)
    assert scores.total.dtype == scores.rewards["ids"].dtype == np.float32
    assert (scores.invalid, scores.errors, scores.reasons) == ({"size": 0, "ids": 0}, {"size": 0, "ids": 0}, {})


def test_fractions_are_not_lost(sample):
    """Field lesson 25: 0.7 became 0."""
    scores = build({"a": spec("some_invalid"), "b": spec("arrays", weight=0.0)})([sample("x"), sample("y")])
    np.testing.assert_allclose(scores.total, [0.7, 0.7], rtol=1e-6)
    np.testing.assert_allclose(build({"a": spec("truths")})([sample("a"), sample("b")]).total, [1, 0])


def test_invalid_values_are_masked_and_counted(sample):
    """Field lesson 2: one None poisoned its group."""
    samples = [sample(c) for c in ("x", "none", "nan", "inf", "reason", "y")]
    scores = build({"a": spec("some_invalid"), "size": spec("size")})(samples)
    assert np.isnan(scores.total).tolist() == [False, True, True, True, True, False]
    np.testing.assert_allclose(scores.total[[0, 5]], [1.7, 1.7], rtol=1e-6)
    assert scores.invalid == {"a": 4, "size": 0}
    assert scores.reasons == {"a: no verdict": 1}
    assert np.isfinite(scores.rewards["size"]).all()


def test_a_reward_without_weight_masks_nothing(sample):
    scores = build({"a": spec("some_invalid", weight=0.0), "size": spec("size")})([sample("none")])
    assert scores.total.tolist() == [4.0]
    assert scores.invalid["a"] == 1


def test_an_exception_names_its_sample(sample):
    scorer = build({"mine": spec("fails_on_bad")})
    samples = [sample("ok"), sample("bad", text="what is it?"), sample("ok")]
    with pytest.raises(RewardError) as caught:
        scorer(samples)
    message = str(caught.value)
    assert "reward 'mine' (reward_functions:fails_on_bad) failed: ZeroDivisionError: no luck" in message
    assert "sample 1 of the prompt in p.jsonl:2" in message
    assert "prompt: 'what is it?'" in message
    assert "completion: 'bad'" in message
    assert caught.value.sample is samples[1]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_exceptions_are_counted_if_so_configured(sample, caplog):
    scorer = build({"mine": spec("fails_on_bad"), "size": spec("size")}, on_error="count")
    scores = scorer([sample("ok"), sample("bad"), sample("ok")])
    assert np.isnan(scores.total).tolist() == [False, True, False]
    np.testing.assert_allclose(scores.total[[0, 2]], [3, 3])
    assert (scores.errors, scores.invalid) == ({"mine": 1, "size": 0}, {"mine": 0, "size": 0})
    assert scores.reasons == {"mine: ZeroDivisionError: no luck": 1}
    scorer([sample("bad")])
    assert sum("no luck" in record.getMessage() for record in caplog.records) == 1  # said once


def test_a_function_that_fails_only_on_several(sample):
    samples = [sample("a"), sample("b")]
    with pytest.raises(RewardError, match=r"failed on 2 samples together: OSError: too many"):
        build({"r": spec("fails_together")})(samples)
    assert build({"r": spec("fails_together")}, on_error="count")(samples).total.tolist() == [0.5, 0.5]
    assert build({"r": spec("fails_together", chunk=1)})(samples).total.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("on_error", ["raise", "count"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "returned 1 values for 2 samples"),
        ("nothing", "returned NoneType for 2 samples"),
        ("text", r"returned 'good' \(str\) where a number, None, Invalid or Failed was expected\n.*p\.jsonl:1"),
    ],
)
def test_results_that_are_no_rewards(sample, name, message, on_error):
    with pytest.raises(RewardError, match=message):
        build({"r": spec(name)}, on_error=on_error)([sample("a"), sample("b")])


def test_no_samples():
    scores = build({"size": spec("size"), "r": spec("too_few")})([])
    assert scores.total.shape == scores.rewards["r"].shape == (0,)


def test_workers_run_functions_and_chunks_at_the_same_time(sample):
    scorer = build({"size": spec("size"), "r": spec("notes_threads", chunk=2)}, workers=4)
    scores = scorer([sample("x" * i) for i in range(1, 6)])
    # The three chunks (2, 2 and 1 samples) wait for each other, so they ran side by side, and came back in order.
    assert scores.rewards["r"].tolist() == [2, 2, 2, 2, 1]
    assert scores.rewards["size"].tolist() == [1, 2, 3, 4, 5]
    assert len(sys.modules["reward_functions"].threads) == 3
    scorer.close()


def test_scoring_starts_before_all_samples_have_ended(sample):
    """And which samples share a call does not depend on who ends first."""
    scorer = build({"r": spec("notes_calls", chunk=2), "size": spec("size")}, workers=2)
    functions = sys.modules["reward_functions"]
    functions.called.clear()
    samples = [sample("x" * i) for i in range(1, 6)]
    scoring = scorer.begin(5)
    for place in (4, 1, 3, 0):
        scoring.add(place, samples[place])
    assert functions.event.wait(20)  # two chunks are whole
    scoring.add(2, samples[2])
    scores = scoring.result()
    assert sorted(functions.called) == [[1, 2], [3, 4], [5]]
    assert functions.called[-1] == [3, 4]
    assert scores.rewards["r"].tolist() == scores.rewards["size"].tolist() == [1, 2, 3, 4, 5]
    scorer.close()


def test_a_failure_is_seen_while_others_are_sampled(sample):
    scorer = build({"r": spec("fails_on_bad", chunk=1)}, workers=2)
    scoring = scorer.begin(1000)

    def sampling() -> None:
        for place in range(1000):
            scoring.add(place, sample("good" if place else "bad"))
            time.sleep(0.01)

    with pytest.raises(RewardError, match="no luck"):
        sampling()
    scorer.close()


def test_a_sample_that_never_came(sample):
    scoring = build({"size": spec("size")}).begin(2)
    scoring.add(0, sample("a"))
    with pytest.raises(ValueError, match="sample 1 was not added"):
        scoring.result()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fn": "no_such_package.rules:f"}, "rewards.r.fn = 'no_such_package.rules:f': no module 'no_such_package'"),
        ({"fn": "yatt_jax.rewards.rule:digits"}, r"no module 'yatt_jax\.rewards\.rule' \(did you mean 'rules'\?\)"),
        ({"fn": "yatt_jax.rewards.rules:exact_mach"}, r"has no 'exact_mach' \(did you mean 'exact_match'\?\)"),
        ({"fn": "reward_functions:constant"}, "is int, and not a function"),
        ({"fn": "reward_functions:asynchronous"}, "is an async function"),
        (
            {"fn": "reward_functions:size", "kwargs": {"scal": 2}},
            r"rewards\.r\.kwargs\.scal: .*no such argument \(did you mean 'scale'\?\)",
        ),
        ({"fn": "reward_functions:needs_target"}, r"rewards\.r\.kwargs: .* needs target"),
    ],
)
def test_names_and_arguments_are_checked_first(given, message):
    with pytest.raises(InputError, match=message):
        build({"r": RewardSpec(**given)})


def test_modules_that_cannot_be_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rewards_missing_dependency.py").write_text("import surely_not_installed\n")
    (tmp_path / "rewards_broken.py").write_text("raise RuntimeError('at import')\n")
    with pytest.raises(InputError, match="needs the module 'surely_not_installed', which is not installed"):
        build({"r": RewardSpec("rewards_missing_dependency:f")})
    with pytest.raises(InputError, match="importing rewards_broken failed: RuntimeError: at import"):
        build({"r": RewardSpec("rewards_broken:f")})


def test_specs_are_checked():
    for bad in ("", "rules", "a.b:c:d", "a/b.py:f"):
        with pytest.raises(ValueError, match="expected an import path"):
            RewardSpec(bad)
    with pytest.raises(ValueError, match="weight = nan"):
        spec("size", weight=float("nan"))
    with pytest.raises(ValueError, match="chunk = -1"):
        spec("size", chunk=-1)
    assert RewardSpec.from_string("a.b:c") == RewardSpec("a.b:c", 1.0, {}, 0)
    with pytest.raises(InputError, match="rewards is empty"):
        build({})
    with pytest.raises(InputError, match="every weight is 0"):
        build({"r": spec("size", weight=0.0)})


def test_a_missing_column_stops_even_when_errors_are_counted(sample):
    scorer = build({"r": RewardSpec("yatt_jax.rewards.rules:exact_match")}, on_error="count")
    with pytest.raises(InputError, match=r'p\.jsonl:1: the reward needs the field "answer".*\[\'gold\'\]'):
        scorer([sample("a", gold="a")])
