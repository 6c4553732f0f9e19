"""Every algorithm without a critic: what its defaults compute, that each option counts, and what must not matter."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.algos.sampled import ALGOS, EACH, GROUP, RATIOS, RESPONSE, REWARDS, B, T, loss, prepared, rows
from yatt_jax.algos import best_of_n, distill, grpo, reinforce_pp, rloo
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.correction import Correction
from yatt_jax.ops.kl import KlPenalty
from yatt_jax.ops.policy import Clip
from yatt_jax.ops.rewards import Shaping

MASK = RESPONSE.astype(np.float64)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


# The losses of the defaults, written from their definitions in float64.


def logprobs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the old policy, the reference and the policy now."""
    _, scores, outputs = rows()
    return wide(scores["actor"].logprobs), wide(scores["reference"].logprobs), wide(outputs.logprobs)


def by_group(scores: np.ndarray, function: Any) -> np.ndarray:
    out = np.zeros(B)
    for g in (0, 1):
        at = np.flatnonzero(np.equal(GROUP, g))
        out[at] = function(scores[at])
    return out


def standardised(scores: np.ndarray) -> np.ndarray:
    return by_group(scores, lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-4))


def others(scores: np.ndarray) -> np.ndarray:
    return by_group(scores, lambda r: [r[i] - np.delete(r, i).mean() for i in range(len(r))])


def clipped(ratio: np.ndarray, A: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.maximum(-ratio * A, -np.clip(ratio, 1 - low, 1 + high) * A)


def sequence_mean(x: np.ndarray) -> float:
    return float(np.mean([x[b][MASK[b] > 0].mean() for b in range(B) if MASK[b].any()]))


def token_mean(x: np.ndarray) -> float:
    return float(x[MASK > 0].mean())


def defined(name: str, new: np.ndarray, constant: np.ndarray) -> float:
    """The loss at log-probabilities ``new``; what carries no gradient is taken at ``constant``."""
    old, reference, _ = logprobs()
    ratio = np.exp(new - old)
    rewards = wide(REWARDS)
    A = standardised(rewards)[:, None] * np.ones(T)
    if name == "grpo":
        d = reference - new
        return sequence_mean(clipped(ratio, A, 0.2, 0.2) + 0.04 * (np.exp(d) - 1 - d))
    if name == "dr_grpo":
        A = by_group(rewards, lambda r: r - r.mean())[:, None] * np.ones(T)
        trained = np.count_nonzero(MASK.sum(axis=1))
        return float(clipped(ratio, A, 0.2, 0.2)[MASK > 0].sum() / (trained * 1024))
    if name == "gspo":
        mean = ((new - old) * MASK).sum(1) / np.maximum(MASK.sum(1), 1)
        return sequence_mean(clipped(np.exp(mean)[:, None] * np.ones(T), A, 3e-4, 4e-4))
    if name == "cispo":
        return token_mean(-np.clip(np.exp(constant - old), 0, 5) * A * new)
    if name == "dapo":
        return token_mean(clipped(ratio, A, 0.2, 0.28))
    if name == "rloo":
        A = others(rewards - 0.05 * ((old - reference) * MASK).sum(1))[:, None] * np.ones(T)
        whole = np.exp(((new - old) * MASK).sum(1))[:, None] * np.ones(T)
        return sequence_mean(clipped(whole, A, 0.2, 0.2))
    if name == "reinforce_pp":
        per_token = -0.01 * (old - reference) * MASK
        for b in range(B):
            if MASK[b].any():
                per_token[b, np.flatnonzero(MASK[b])[-1]] += rewards[b]
        A = np.cumsum(per_token[:, ::-1], axis=1)[:, ::-1]
        A = (A - A[MASK > 0].mean()) / A[MASK > 0].std()
        return token_mean(clipped(ratio, A, 0.2, 0.2))
    if name == "best_of_n":
        best = [0, 5]  # of groups 0 and 1
        return float(-np.concatenate([new[b][MASK[b] > 0] for b in best]).mean())
    assert name == "distill"
    teacher = wide(rows()[1]["teacher"].logprobs)
    return token_mean(clipped(ratio, teacher - old, 0.2, 0.2))


@pytest.mark.parametrize("name", ALGOS)
def test_the_defaults_compute_what_the_paper_says(name):
    new = logprobs()[2]
    assert loss(ALGOS[name], ALGOS[name].Hyper()) == pytest.approx(defined(name, new, new), abs=1e-5)


@pytest.mark.parametrize("name", ALGOS)
def test_gradients_by_differences(name):
    algo, hyper, (_, _, outputs) = ALGOS[name], ALGOS[name].Hyper(), rows()
    batch, _ = prepared(algo, hyper)
    slopes = jax.grad(lambda x: algo.LOSSES["actor"](x, batch, hyper)[0].mean())(outputs).logprobs
    new, h = logprobs()[2], 1e-6
    differences = np.zeros((B, T))
    for at in np.ndindex(B, T):
        step = np.zeros((B, T))
        step[at] = h
        differences[at] = (defined(name, new + step, new) - defined(name, new - step, new)) / (2 * h)
    assert np.abs(differences).max() > 1e-4
    np.testing.assert_allclose(slopes, differences, atol=1e-6)


# What must not matter.


@EACH
def test_rows_in_another_order_give_the_same(algo):
    hyper = algo.Hyper()
    rollout, every_score, outputs = rows()
    scores = {role: every_score[role] for role in algo.scored_by(hyper)}
    batch, metrics = prepared(algo, hyper)
    order = np.random.default_rng(3).permutation(B)
    take = functools.partial(jax.tree.map, lambda x: x[order])
    again, others = algo.prepare(
        take(rollout), jnp.asarray(REWARDS)[order], take(scores), hyper, jnp.float32(hyper.kl.coef)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[order], b, atol=1e-5), batch, again)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), metrics, others)
    one = algo.LOSSES["actor"](outputs, batch, hyper)
    two = algo.LOSSES["actor"](take(outputs), again, hyper)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), one, two)


@pytest.mark.parametrize("algo", [grpo, rloo, reinforce_pp, best_of_n], ids=lambda a: a.__name__)
def test_groups_that_are_spread_over_devices_give_the_same(algo):
    """One row on each of eight devices."""
    hyper = algo.Hyper()
    rollout, every_score, _ = rows()
    scores = {role: every_score[role] for role in algo.scored_by(hyper)}
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("rows",))
    spread = jax.device_put((rollout, jnp.asarray(REWARDS), scores), jax.NamedSharding(mesh, jax.P("rows")))
    got = jax.jit(algo.prepare, static_argnums=3)(*spread, hyper, hyper.kl.coef)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), prepared(algo, hyper), got)


@EACH
def test_the_gradient_is_the_same_for_every_split(algo):
    hyper = dataclasses.replace(algo.Hyper(), entropy_coef=0.1)
    _, _, outputs = rows()
    batch, _ = prepared(algo, hyper)

    def slope(outputs, batch):
        def total(outputs):
            found, _ = algo.LOSSES["actor"](outputs, batch, hyper)
            return found.total, found.weight

        return jax.grad(total, has_aux=True)(outputs)

    whole, weight = slope(outputs, batch)
    for cuts in ([4], [2, 4, 6]):
        bounds = [0, *cuts, B]
        parts = [jax.tree.map(lambda x, a=a, b=b: x[a:b], (outputs, batch)) for a, b in itertools.pairwise(bounds)]
        found = [slope(*part) for part in parts]
        assert float(sum(w for _, w in found)) == pytest.approx(float(weight))
        joined = jax.tree.map(lambda *x: jnp.concatenate(x), *(g for g, _ in found))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, joined)


@EACH
def test_rows_of_padding_weigh_nothing(algo):
    """Rows of zeros with reward NaN fill a batch up to the devices; a loss also sees rows of zeros alone."""
    hyper = algo.Hyper()
    rollout, every_score, outputs = rows()
    scores = {role: every_score[role] for role in algo.scored_by(hyper)}
    pad = functools.partial(jax.tree.map, lambda x: jnp.pad(x, [(0, 3)] + [(0, 0)] * (x.ndim - 1)))
    filled = jnp.pad(jnp.asarray(REWARDS), (0, 3), constant_values=np.nan)
    batch, metrics = algo.prepare(pad(rollout), filled, pad(scores), hyper, jnp.float32(hyper.kl.coef))
    alone, facts = prepared(algo, hyper)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), metrics, facts)
    one = algo.LOSSES["actor"](outputs, alone, hyper)
    for two in (
        algo.LOSSES["actor"](pad(outputs), batch, hyper),
        algo.LOSSES["actor"](pad(outputs), pad(alone), hyper),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, two)


@EACH
def test_an_invalid_reward_is_masked_and_counted(algo):
    rewards = REWARDS.copy()
    rewards[3] = np.nan
    batch, metrics = prepared(algo, algo.Hyper(), rewards)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(batch))
    assert not batch.response_mask[3].any()
    assert not batch.advantages[3].any()
    assert float(metrics["reward"].mean()) == pytest.approx(np.nanmean(rewards), abs=1e-6)
    assert float(metrics["reward_invalid"].mean()) == pytest.approx(1 / B)
    value, slopes = jax.value_and_grad(lambda x: algo.LOSSES["actor"](x, batch, algo.Hyper())[0].mean())(rows()[2])
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(x)) and not np.any(x[3]) for x in jax.tree.leaves(slopes))


@EACH
def test_no_valid_reward_at_all_is_no_data(algo):
    batch, _ = prepared(algo, algo.Hyper(), np.full(B, np.nan))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(batch))
    found, metrics = algo.LOSSES["actor"](rows()[2], batch, algo.Hyper())
    assert (float(found.total), float(found.weight)) == (0.0, 0.0)
    assert all(np.isfinite(float(m.mean())) for name, m in metrics.items() if name != "ratio_max")


@EACH
def test_an_empty_response_has_no_loss(algo):
    batch, metrics = prepared(algo, algo.Hyper())
    assert not batch.advantages[2].any()
    assert float(metrics["reward"].weight) == B  # its reward is recorded
    row, seen = jax.tree.map(lambda x: x[2:3], (batch, rows()[2]))
    value, slopes = jax.value_and_grad(lambda x: algo.LOSSES["actor"](x, row, algo.Hyper())[0].total)(seen)
    assert value == 0.0
    assert not any(np.any(x) for x in jax.tree.leaves(slopes))


def test_an_empty_response_counts_in_its_group_like_any_other():
    """Its neighbours see its reward, and not whether it has tokens."""
    rollout, scores, _ = rows()
    longer = dataclasses.replace(rollout, response_mask=rollout.response_mask.at[2, 2].set(1.0))
    hyper = grpo.Hyper()
    one, _ = prepared(grpo, hyper)
    two, _ = grpo.prepare(longer, jnp.asarray(REWARDS), scores, hyper, jnp.float32(0.04))
    keep = np.arange(B) != 2
    np.testing.assert_array_equal(one.advantages[keep], two.advantages[keep])


@RATIOS
def test_before_the_first_update_the_ratio_is_one(algo):
    hyper = algo.Hyper()
    batch, _ = prepared(algo, hyper)
    _, metrics = algo.LOSSES["actor"](rows()[1]["actor"], batch, hyper)
    assert float(metrics["ratio_mean"].mean()) == pytest.approx(1.0, abs=1e-6)
    assert float(metrics["ratio_max"].value) == 1.0
    assert float(metrics["kl_update"].mean()) == 0.0
    assert float(metrics["clip_fraction"].mean()) == 0.0


# Each on its own.


def test_old_log_probabilities_of_the_sampler():
    hyper = grpo.Hyper(old_logprobs="sampled")
    batch, metrics = prepared(grpo, hyper)
    np.testing.assert_array_equal(batch.old_logprobs, rows()[0].plain_logprobs)
    assert "entropy_sampled" not in metrics
    assert "kl_response" in metrics  # the coefficient can still adapt


def test_the_forward_pass_of_the_update_is_the_old_policy():
    """With one update a rollout the gradient is the same as with a pass of its own for the old log-probabilities."""
    outputs = rows()[1]["actor"]

    def gradient(hyper: grpo.Hyper) -> np.ndarray:
        batch, _ = prepared(grpo, hyper)

        def total(logprobs: jax.Array) -> jax.Array:
            value, metrics = grpo.LOSSES["actor"](dataclasses.replace(outputs, logprobs=logprobs), batch, hyper)
            assert set(metrics) >= {"ratio_max", "kl_update"}
            return value.total

        return np.asarray(jax.grad(total)(outputs.logprobs))

    scored, current = (gradient(grpo.Hyper(old_logprobs=how)) for how in ("scored", "current"))
    assert np.abs(scored).max() > 0.01
    np.testing.assert_allclose(current, scored, atol=1e-7)
    assert prepared(grpo, grpo.Hyper(old_logprobs="current"))[0].old_logprobs is None


def test_correction_weighs_the_policy_loss_alone():
    """Not the divergence: with advantages of 0 it is the whole loss, whatever the weights."""
    equal = np.zeros(B, np.float32)
    plain, corrected = grpo.Hyper(), grpo.Hyper(correction=Correction("mask", limit=1e-6))
    assert loss(grpo, plain, equal) == pytest.approx(loss(grpo, corrected, equal), abs=1e-7)
    assert loss(grpo, plain, equal) > 0
    _, metrics = prepared(grpo, corrected)
    assert float(metrics["correction_cut"].mean()) == 1.0


def test_combinations_are_configuration():
    """RLOO's baseline with GSPO's ratio and DAPO's clip and length price."""
    hyper = rloo.Hyper(
        kl=KlPenalty("none"),
        reward=Shaping(overlong_limit=5, overlong_cache=2),
        clip=Clip(low=0.2, high=0.28, level="sequence_mean"),
        aggregation=Aggregation("sequence_mean"),
    )
    old, _, new = logprobs()
    lengths = MASK.sum(1)
    A = others(wide(REWARDS) + np.clip((5 - 2 - lengths) / 2, -1, 0))[:, None] * np.ones(T)
    ratio = np.exp(((new - old) * MASK).sum(1) / np.maximum(lengths, 1))[:, None] * np.ones(T)
    assert loss(rloo, hyper) == pytest.approx(sequence_mean(clipped(ratio, A, 0.2, 0.28)), abs=1e-5)


def test_reinforce_pp_by_hand():
    """Two rows of two and one tokens, rewards 1 and 0, no divergence, gamma .5: returns .5, 1 and 0."""
    rollout, scores, _ = jax.tree.map(lambda x: x[:2, :3] if x.ndim > 1 else x[:2], rows())
    mask = jnp.array([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    rollout = dataclasses.replace(rollout, response_mask=mask, group=jnp.zeros(2, jnp.int32))
    cases: list[tuple[Literal["none", "group_mean"], list[float]]] = [
        ("none", [0.5, 1.0, 0.0]),
        ("group_mean", [0.25, 0.5, -0.5]),
    ]
    for baseline, returns in cases:
        hyper = reinforce_pp.Hyper(kl=KlPenalty("none"), gamma=0.5, baseline=baseline)
        batch, _ = reinforce_pp.prepare(rollout, jnp.array([1.0, 0.0]), scores, hyper, jnp.float32(0))
        white = (np.array(returns) - np.mean(returns)) / np.std(returns)
        np.testing.assert_allclose(batch.advantages, [[0, white[0], white[1]], [0, white[2], 0]], atol=1e-5)


def test_distillation_follows_the_gradient_of_the_divergence():
    """Over all tokens of a vocabulary, weighted by their probability, it is that of KL(policy || teacher)."""
    V = 5
    rng = np.random.default_rng(1)
    logits, teacher = jnp.asarray(rng.normal(size=(2, V)), jnp.float32)
    logp, logq = jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher)
    table = jnp.ones((V, 2), jnp.int32)
    second = jnp.tile(jnp.array([0.0, 1.0]), (V, 1))  # one token a row, all V of them

    def at_second(x):
        return jnp.stack([jnp.zeros(V), x], axis=1)

    rollout = dataclasses.replace(
        jax.tree.map(lambda x: jnp.resize(x, (V, *x.shape[1:])), rows()[0]), response_mask=second
    )
    rollout = dataclasses.replace(
        rollout,
        inputs=dataclasses.replace(rollout.inputs, tokens=table, positions=table, segments=table),
        sampled_logprobs=at_second(logp),
        plain_logprobs=at_second(logp),
    )
    scores = {"actor": rows()[1]["actor"], "teacher": rows()[1]["actor"]}
    scores = {
        k: dataclasses.replace(scores[k], logprobs=at_second(v), entropy=second)
        for k, v in zip(scores, (logp, logq), strict=True)
    }
    hyper = distill.Hyper()
    batch, facts = distill.prepare(rollout, jnp.zeros(V), scores, hyper, jnp.float32(0))
    weighted = dataclasses.replace(batch, advantages=batch.advantages * jnp.exp(logp)[:, None] * V)

    def policy_loss(logits):
        outputs = dataclasses.replace(scores["actor"], logprobs=at_second(jax.nn.log_softmax(logits)))
        return distill.LOSSES["actor"](outputs, weighted, hyper)[0].mean()

    def divergence(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - logq))

    np.testing.assert_allclose(jax.grad(policy_loss)(logits), jax.grad(divergence)(logits), atol=1e-6)
    metrics: Any = facts
    assert float(metrics["teacher_kl"].mean()) == pytest.approx(float(jnp.mean(logp - logq)), abs=1e-6)


def test_distillation_sums_what_follows():
    batch, _ = prepared(distill, distill.Hyper(gamma=1.0))
    _, scores, _ = rows()
    gap = wide(scores["teacher"].logprobs - scores["actor"].logprobs) * MASK
    np.testing.assert_allclose(batch.advantages, np.cumsum(gap[:, ::-1], 1)[:, ::-1] * MASK, atol=1e-5)


def test_best_of_n_trains_the_best_rows_alone():
    batch, metrics = prepared(best_of_n, best_of_n.Hyper(keep=2))
    kept = {0, 5, 3}  # the second best of group 0 is the empty row
    assert {int(b) for b in np.flatnonzero(np.asarray(batch.response_mask).any(1))} == kept
    assert float(metrics["score_kept"].mean()) == pytest.approx(REWARDS[[0, 2, 3, 5]].mean(), abs=1e-6)
