"""Every algorithm without a critic: each of its options counts, and it keeps the protocol of the loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tests.algos.sampled import ALGOS, EACH, RATIOS, B, loss, prepared
from yatt_jax.algos import best_of_n, distill, grpo, reinforce_pp
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.correction import Correction
from yatt_jax.ops.groups import Advantage
from yatt_jax.ops.kl import KlPenalty
from yatt_jax.ops.policy import Clip
from yatt_jax.ops.rewards import Shaping

OPTIONS: dict[str, list[Any]] = {
    "kl.place": [KlPenalty(x, coef=2.0) for x in ("reward", "loss", "none")],
    "kl.estimator": [KlPenalty("loss", "k2"), KlPenalty("loss", "k3")],
    "kl.coef": [KlPenalty("loss", "k3", 0.1), KlPenalty("loss", "k3", 0.5)],
    "reward.scale": [Shaping(), Shaping(scale=-2.0)],
    "reward.clip": [Shaping(), Shaping(clip=0.5)],
    "reward.overlong_limit": [Shaping(overlong_limit=x, overlong_cache=2) for x in (5, 9)],
    "reward.overlong_cache": [Shaping(overlong_limit=7, overlong_cache=x) for x in (2, 5)],
    "reward.missing_eos": [Shaping(missing_eos=x, missing_eos_value=2.0) for x in ("ignore", "subtract", "replace")],
    "reward.missing_eos_value": [Shaping(missing_eos="replace", missing_eos_value=x) for x in (-5.0, 5.0)],
    "reward.mask_truncated": [Shaping(), Shaping(mask_truncated=True)],
    "reward.whiten_scores": [Shaping(scale=0.01, whiten_scores=x) for x in (False, True)],
    "advantage.baseline": [Advantage(x) for x in ("group_mean", "leave_one_out", "none")],
    "advantage.scale": [Advantage(scale=x) for x in ("group_std", "batch_std", "none")],
    "baseline": ["none", "group_mean"],
    "gamma": [1.0, 0.5],
    "keep": [1, 2],
    "mask_truncated": [False, True],
    "clip.low": [Clip(0.2), Clip(0.05)],
    "clip.high": [Clip(high=0.2), Clip(high=0.05)],
    "clip.dual": [Clip(), Clip(dual=1.01)],
    "clip.level": [Clip(level=x) for x in ("token", "sequence_mean", "sequence_product")],
    "clip.how": [Clip(), Clip(how="weight")],
    "aggregation.how": [
        *(Aggregation(x) for x in ("token_mean", "sequence_mean", "sequence_sum")),
        Aggregation("fixed_length", 4),
    ],
    "aggregation.length": [Aggregation("fixed_length", x) for x in (3, 5)],
    "correction.how": [Correction(x, limit=1.1) for x in ("off", "truncate", "mask")],
    "correction.level": [Correction("truncate", x) for x in ("token", "sequence_mean", "sequence_product")],
    "correction.limit": [Correction("truncate", limit=x) for x in (1.1, 1.3)],
    "old_logprobs": ["scored", "sampled"],
    "entropy_coef": [0.0, 0.1],
}
STEERING = {"epochs", "minibatches", "target_kl", "kl.adaptive_target", "kl.adaptive_horizon"}


@EACH
def test_every_option_changes_the_loss(algo):
    plain: dict[str, Any] = {"clip": Clip(), "aggregation": Aggregation(), "kl": KlPenalty("none")}
    fields = {field.name for field in dataclasses.fields(algo.Hyper)}
    start = dataclasses.replace(algo.Hyper(), **{name: value for name, value in plain.items() if name in fields})
    named = set()
    for field in fields:
        value = getattr(start, field)
        inner = dataclasses.fields(value) if dataclasses.is_dataclass(value) else []
        named |= {f"{field}.{f.name}" for f in inner} if inner else {field}
    assert named <= set(OPTIONS) | STEERING
    for option in sorted(named - STEERING):
        base = start
        if option == "reward.whiten_scores":  # the unit of scores shows against that of the divergence
            base = dataclasses.replace(base, kl=KlPenalty("reward", coef=0.5))
        found = [loss(algo, dataclasses.replace(base, **{option.partition(".")[0]: v})) for v in OPTIONS[option]]
        assert np.all(np.isfinite(found)), option
        apart = [abs(a - b) for i, a in enumerate(found) for b in found[:i]]
        assert min(apart) > 1e-4, (option, found)


@EACH
def test_roles(algo):
    hyper = algo.Hyper()
    assert algo.TRAINS == algo.trains(hyper, 0) == algo.trains(hyper, 5) == ("actor",)
    assert set(algo.LOSSES) == {"actor"}
    roles = {best_of_n: {"reference"}, distill: {"actor", "reference", "teacher"}}
    assert set(algo.scored_by(hyper)) <= roles.get(algo, {"actor", "reference"})
    batch, _ = prepared(algo, hyper)
    assert {x.shape[0] for x in jax.tree.leaves(batch)} == {B}
    assert isinstance(batch, algo.Batch)


@RATIOS
@pytest.mark.parametrize(
    ("old", "place"),
    [
        *((old, place) for old in ("scored", "sampled") for place in ("reward", "loss", "none")),
        *(("current", place) for place in ("loss", "none")),
    ],
)
def test_only_what_is_needed_is_scored(algo, old, place):
    hyper = dataclasses.replace(algo.Hyper(), old_logprobs=old, kl=KlPenalty(place))
    needed = [*(["actor"] if old == "scored" else []), *(["reference"] if place != "none" else [])]
    assert list(algo.scored_by(hyper)) == needed + (["teacher"] if algo is distill else [])
    assert np.isfinite(loss(algo, hyper))


def test_a_single_response_to_a_prompt_is_a_fault_where_groups_are_compared():
    for name, algo in ALGOS.items():
        compares = name not in ("reinforce_pp", "distill")
        found = algo.check(algo.Hyper(), 1)
        assert len(found) == compares, name
        if compares:
            assert found[0].startswith("config.rollout.samples_per_prompt = 1: config.hyper."), name
        assert algo.check(algo.Hyper(), 2) == [], name
    [fault] = reinforce_pp.check(reinforce_pp.Hyper(baseline="group_mean"), 1)
    assert "config.hyper.baseline = 'group_mean'" in fault
    assert grpo.check(grpo.Hyper(advantage=Advantage("none", "none")), 1) == []
    [fault] = best_of_n.check(best_of_n.Hyper(keep=4), 4)
    assert "config.hyper.keep = 4 keeps all" in fault


@EACH
def test_faults_name_the_key(algo):
    with pytest.raises(ValueError, match="epochs = 0: must be at least 1"):
        algo.Hyper(epochs=0)
    if algo is not best_of_n:
        with pytest.raises(ValueError, match=r"correction.how = 'mask' compares trainer and sampler"):
            algo.Hyper(old_logprobs="sampled", correction=Correction("mask"))
        with pytest.raises(ValueError, match=r"'current': 6 updates a rollout .* set epochs and minibatches to 1"):
            algo.Hyper(old_logprobs="current", kl=KlPenalty("none"), epochs=3, minibatches=2)
        with pytest.raises(ValueError, match=r"'current': kl.place = 'reward' charges"):
            algo.Hyper(old_logprobs="current", kl=KlPenalty("reward"))
