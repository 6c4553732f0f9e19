from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.algos import ppo
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.correction import Correction
from yatt_jax.ops.kl import KlPenalty
from yatt_jax.ops.policy import Clip
from yatt_jax.ops.rewards import Shaping
from yatt_jax.types import Inputs, Logprobs, Rollout, Values

B, T = 6, 7
RESPONSE = (np.arange(T) >= 2) & (np.arange(T) < np.array([7, 5, 2, 6, 7, 3])[:, None])  # row 2 is empty
REWARDS = np.array([1.3, -0.4, 5.0, 0.7, -1.1, 2.5], np.float32)
PREPARE: Any = ppo.prepare  # not compiled: small operations shared by every case are faster
LOSS: Any = ppo.LOSSES


@functools.cache
def rows() -> tuple[Rollout, dict[str, Any], dict[str, Any]]:
    """A rollout, its scores, and outputs of networks that have moved since."""
    rng = np.random.default_rng(0)
    table = jnp.ones((B, T), jnp.int32)
    old, reference, values, mismatch = (jnp.asarray(rng.normal(size=(B, T)), jnp.float32) for _ in range(4))
    rollout = Rollout(
        inputs=Inputs(table, table, table),
        response_mask=jnp.asarray(RESPONSE, jnp.float32),
        sampled_logprobs=old - 2 + 0.2 * mismatch,
        plain_logprobs=old - 2 + 0.2 * mismatch,
        sample_id=jnp.arange(B),
        group=jnp.arange(B),
        version=jnp.zeros(B, jnp.int32),
        ended=jnp.array([True, False, True, True, False, True]),
    )
    scores = {
        "actor": Logprobs(old - 2, jnp.ones((B, T))),
        "reference": Logprobs(old - 2 + 0.3 * reference, jnp.ones((B, T))),
        "critic": Values(values),
    }
    moved = jnp.asarray(rng.normal(size=(2, B, T)), jnp.float32)
    outputs = {
        "actor": Logprobs(old - 2 + 0.3 * moved[0], 1 + moved[1] ** 2),
        "critic": Values(values + 0.5 * moved[0]),
    }
    return rollout, scores, outputs


@functools.cache
def plain_losses(hyper: ppo.Hyper) -> tuple[float, float]:
    """Those of the rewards above, once."""
    return losses(hyper)


def losses(hyper: ppo.Hyper, rewards: Any = REWARDS) -> tuple[float, float]:
    """Loss of actor and of critic."""
    rollout, scores, outputs = rows()
    needed = {role: scores[role] for role in ppo.scored_by(hyper)}
    batch, _ = PREPARE(rollout, jnp.asarray(rewards), needed, hyper, jnp.float32(hyper.kl.coef))
    actor, critic = (float(LOSS[role](outputs[role], batch, hyper)[0].mean()) for role in ("actor", "critic"))
    return actor, critic


BASE = ppo.Hyper()
OVERLONG = dataclasses.replace(BASE, reward=Shaping(overlong_limit=5, overlong_cache=2))


def test_every_option_changes_a_loss():
    in_loss = dataclasses.replace(BASE, kl=KlPenalty(place="loss"))
    missing = dataclasses.replace(BASE, reward=Shaping(missing_eos="subtract"))
    pairs = {
        "kl.place reward": (BASE, dataclasses.replace(BASE, kl=KlPenalty(place="none"))),
        "kl.place loss": (BASE, in_loss),
        "kl.estimator": (BASE, dataclasses.replace(BASE, kl=KlPenalty(estimator="k3"))),
        "kl.estimator in the loss": (in_loss, dataclasses.replace(BASE, kl=KlPenalty(place="loss", estimator="k2"))),
        "kl.coef": (BASE, dataclasses.replace(BASE, kl=KlPenalty(coef=0.5))),
        "kl.coef in the loss": (in_loss, dataclasses.replace(BASE, kl=KlPenalty(place="loss", coef=0.5))),
        "reward.scale": (BASE, dataclasses.replace(BASE, reward=Shaping(scale=2.0))),
        "reward.clip": (BASE, dataclasses.replace(BASE, reward=Shaping(clip=1.0))),
        "reward.missing_eos subtract": (BASE, missing),
        "reward.missing_eos replace": (BASE, dataclasses.replace(BASE, reward=Shaping(missing_eos="replace"))),
        "reward.missing_eos_value": (
            missing,
            dataclasses.replace(BASE, reward=Shaping(missing_eos="subtract", missing_eos_value=2.0)),
        ),
        "reward.mask_truncated": (BASE, dataclasses.replace(BASE, reward=Shaping(mask_truncated=True))),
        "reward.whiten_scores": (BASE, dataclasses.replace(BASE, reward=Shaping(whiten_scores=True))),
        "reward.overlong_limit": (
            OVERLONG,
            dataclasses.replace(BASE, reward=Shaping(overlong_limit=6, overlong_cache=2)),
        ),
        "reward.overlong_cache": (
            OVERLONG,
            dataclasses.replace(BASE, reward=Shaping(overlong_limit=5, overlong_cache=4)),
        ),
        "whiten_rewards": (BASE, dataclasses.replace(BASE, whiten_rewards=True)),
        "old_logprobs": (BASE, dataclasses.replace(BASE, old_logprobs="sampled")),
        "correction.how": (BASE, dataclasses.replace(BASE, correction=Correction("truncate", limit=1.2))),
        "correction.how mask": (
            dataclasses.replace(BASE, correction=Correction("truncate", limit=1.2)),
            dataclasses.replace(BASE, correction=Correction("mask", limit=1.2)),
        ),
        "correction.level": (
            dataclasses.replace(BASE, correction=Correction("truncate")),
            dataclasses.replace(BASE, correction=Correction("truncate", "sequence_mean")),
        ),
        "correction.limit": (
            dataclasses.replace(BASE, correction=Correction("truncate", limit=1.2)),
            dataclasses.replace(BASE, correction=Correction("truncate", limit=1.3)),
        ),
        "clip.low": (BASE, dataclasses.replace(BASE, clip=Clip(low=0.05))),
        "clip.high": (BASE, dataclasses.replace(BASE, clip=Clip(high=0.05))),
        "clip.level": (BASE, dataclasses.replace(BASE, clip=Clip(level="sequence_mean"))),
        "clip.how": (BASE, dataclasses.replace(BASE, clip=Clip(how="weight"))),
        "clip.dual": (BASE, dataclasses.replace(BASE, clip=Clip(dual=1.01))),
        "aggregation.how mean": (BASE, dataclasses.replace(BASE, aggregation=Aggregation("sequence_mean"))),
        "aggregation.how sum": (BASE, dataclasses.replace(BASE, aggregation=Aggregation("sequence_sum"))),
        "aggregation.length": (
            dataclasses.replace(BASE, aggregation=Aggregation("fixed_length", 5)),
            dataclasses.replace(BASE, aggregation=Aggregation("fixed_length", 6)),
        ),
        "gamma": (BASE, dataclasses.replace(BASE, gamma=0.9)),
        "lam": (BASE, dataclasses.replace(BASE, lam=0.5)),
        "value_clip": (BASE, dataclasses.replace(BASE, value_clip=0.0)),
        "entropy_coef": (BASE, dataclasses.replace(BASE, entropy_coef=0.1)),
        "whiten_advantages": (BASE, dataclasses.replace(BASE, whiten_advantages=False)),
    }
    for name, (one, other) in pairs.items():
        a, b = plain_losses(one), plain_losses(other)
        assert all(np.isfinite([*a, *b])), name
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) > 1e-4, name
    named = {name.split()[0] for name in pairs}
    fields = set()
    for field in dataclasses.fields(ppo.Hyper):
        value = getattr(BASE, field.name)
        inner = dataclasses.fields(value) if dataclasses.is_dataclass(value) else []
        fields |= {f"{field.name}.{f.name}" for f in inner} if inner else {field.name}
    # What steers the run and not a loss has tests of its own: below, and with the loop.
    run = {"epochs", "minibatches", "critic_warmup_steps", "target_kl", "kl.adaptive_target", "kl.adaptive_horizon"}
    assert fields == named | run


def test_the_adaptive_coefficient_is_an_argument_that_counts():
    rollout, scores, outputs = rows()
    for place in ("reward", "loss"):
        hyper = dataclasses.replace(BASE, kl=KlPenalty(place=place))
        found = []
        for coefficient in (0.05, 0.2):
            batch, _ = PREPARE(rollout, jnp.asarray(REWARDS), scores, hyper, jnp.float32(coefficient))
            found.append(float(LOSS["actor"](outputs["actor"], batch, hyper)[0].mean()))
        assert abs(found[0] - found[1]) > 1e-4


def test_roles():
    assert ppo.scored_by(BASE) == ("actor", "reference", "critic")
    assert ppo.scored_by(dataclasses.replace(BASE, kl=KlPenalty(place="none"))) == ("actor", "critic")
    sampled = dataclasses.replace(BASE, old_logprobs="sampled")
    assert ppo.scored_by(sampled) == ("reference", "critic")
    assert ppo.check(BASE, 1) == []
    warm = dataclasses.replace(BASE, critic_warmup_steps=2)
    assert [ppo.trains(warm, step) for step in (0, 1, 2)] == [("critic",), ("critic",), ("critic", "actor")]
    assert ppo.trains(BASE, 0) == ("critic", "actor")
    assert set(ppo.LOSSES) == set(ppo.TRAINS)


def arrays(batch: ppo.Batch, row: int) -> dict[str, np.ndarray]:
    names = ("response_mask", "old_logprobs", "old_values", "advantages", "returns")
    return {name: np.asarray(getattr(batch, name))[row] for name in names}


def prepared(rewards: Any, hyper: ppo.Hyper = BASE) -> tuple[ppo.Batch, dict[str, Any]]:
    rollout, scores, _ = rows()
    return PREPARE(rollout, jnp.asarray(rewards, jnp.float32), scores, hyper, jnp.float32(0.05))


def test_an_invalid_reward_is_masked_and_counted():
    rewards = REWARDS.copy()
    rewards[3] = np.nan
    hyper = dataclasses.replace(BASE, reward=Shaping(whiten_scores=True), whiten_rewards=True)
    batch, metrics = prepared(rewards, hyper)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(batch))
    assert not batch.response_mask[3].any()
    assert float(metrics["reward"].mean()) == pytest.approx(np.nanmean(rewards), abs=1e-6)
    assert float(metrics["reward"].weight) == 5
    assert float(metrics["reward_invalid"].mean()) == pytest.approx(1 / 6)
    # What stands in the row makes no difference to the loss.
    other, scores, outputs = rows()
    louder = {**scores, "critic": Values(scores["critic"].values.at[3].add(7.0))}
    again, _ = PREPARE(other, jnp.asarray(rewards), louder, hyper, jnp.float32(0.05))
    for role in ("actor", "critic"):
        one, two = (float(LOSS[role](outputs[role], b, hyper)[0].mean()) for b in (batch, again))
        assert one == pytest.approx(two, abs=1e-6)


def test_one_invalid_reward_of_four_leaves_the_mean_of_the_others():
    rollout, scores, _ = rows()
    rollout, scores = jax.tree.map(lambda x: x[:4], (rollout, scores))
    _, metrics = PREPARE(rollout, jnp.array([1.0, jnp.nan, 0.0, 1.0]), scores, BASE, jnp.float32(0.05))
    assert float(metrics["reward"].mean()) == pytest.approx(2 / 3)


def test_an_empty_response_is_recorded_and_costs_nothing():
    batch, metrics = prepared(REWARDS)
    other, other_metrics = prepared(np.where(np.arange(B) == 2, 1000.0, REWARDS))
    for row in range(B):
        for name, x in arrays(batch, row).items():
            np.testing.assert_array_equal(x, arrays(other, row)[name])
    assert not any(arrays(batch, 2)[name].any() for name in ("response_mask", "advantages", "returns"))
    difference = float(other_metrics["reward"].mean() - metrics["reward"].mean())
    assert difference == pytest.approx((1000.0 - 5.0) / B, rel=1e-5)
    _, _, outputs = rows()

    def totals(role, rows):
        """Loss and gradient of some rows."""
        part, seen = jax.tree.map(lambda x: x[rows], (batch, outputs[role]))
        return jax.value_and_grad(lambda out: LOSS[role](out, part, BASE)[0].total)(seen)

    for role in ("actor", "critic"):
        total, slopes = totals(role, np.array([2]))
        assert total == 0.0
        assert not any(np.any(x) for x in jax.tree.leaves(slopes))


def test_rows_of_zeros_weigh_nothing():
    batch, _ = prepared(REWARDS)
    _, _, outputs = rows()
    pad = functools.partial(jax.tree.map, lambda x: jnp.pad(x, [(0, 3)] + [(0, 0)] * (x.ndim - 1)))
    for role in ("actor", "critic"):
        for how in (Aggregation(), Aggregation("sequence_mean"), Aggregation("fixed_length", 5)):
            hyper = dataclasses.replace(BASE, aggregation=how)
            one = LOSS[role](outputs[role], batch, hyper)
            two = LOSS[role](pad(outputs[role]), pad(batch), hyper)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, two)


def test_before_the_first_update_the_ratio_is_one_and_nothing_is_clipped():
    batch, _ = prepared(REWARDS)
    _, scores, _ = rows()
    _, metrics = LOSS["actor"](scores["actor"], batch, BASE)
    assert float(metrics["ratio_mean"].mean()) == 1.0
    assert float(metrics["ratio_max"].value) == 1.0
    assert float(metrics["kl_update"].mean()) == 0.0
    assert float(metrics["clip_fraction"].mean()) == 0.0
    same = {**scores, "reference": scores["actor"]}
    _, metrics = PREPARE(rows()[0], jnp.asarray(REWARDS), same, BASE, jnp.float32(0.05))
    assert all(float(metrics[name].mean()) == 0.0 for name in ("kl_k1", "kl_k3", "kl_response"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ppo.Hyper(gamma=1.5), "gamma = 1.5: must be at least 0 and at most 1"),
        (lambda: ppo.Hyper(lam=-0.1), "lam = -0.1"),
        (lambda: ppo.Hyper(epochs=0), "epochs = 0: must be at least 1"),
        (lambda: ppo.Hyper(minibatches=0), "minibatches = 0"),
        (lambda: ppo.Hyper(value_clip=-1.0), "value_clip = -1.0"),
        (lambda: ppo.Hyper(target_kl=float("nan")), "target_kl = nan"),
        (lambda: ppo.Hyper(whiten_advantages=1), "whiten_advantages = 1: expected True or False"),  # pyright: ignore
        (lambda: KlPenalty(place="losses"), "place = 'losses': expected one of ['reward', 'loss', 'none']"),  # pyright: ignore
        (lambda: KlPenalty(estimator="k4"), "estimator = 'k4'"),  # pyright: ignore
        (lambda: KlPenalty(coef=-0.1), "coef = -0.1: must be at least 0"),
        (lambda: Clip(low=1.2), "low = 1.2"),
        (lambda: Shaping(missing_eos="penalty"), "missing_eos = 'penalty'"),  # pyright: ignore
        (lambda: Shaping(scale=float("inf")), "scale = inf"),
        (lambda: Shaping(overlong_limit=10), "overlong_cache = 0: from 1 to overlong_limit = 10"),
        (lambda: Shaping(overlong_cache=10), "overlong_cache = 10: from 1 to overlong_limit = 0, or 0 with no limit"),
        (lambda: Shaping(overlong_limit=10, overlong_cache=11), "overlong_cache = 11"),
        (lambda: ppo.Hyper(old_logprobs="actor"), "old_logprobs = 'actor'"),  # pyright: ignore
        (
            lambda: ppo.Hyper(old_logprobs="sampled", correction=Correction("mask")),
            "correction.how = 'mask' compares trainer and sampler: it needs old_logprobs = 'scored'",
        ),
    ],
)
def test_faults_name_the_key(make, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make()
    assert message in str(error.value)
