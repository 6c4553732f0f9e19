"""One PPO update of a real decoder against float64 NumPy written from the definitions, gradients by differences."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.algos import ppo
from yatt_jax.controller.optimizer import OptimizerConfig, make_optimizer
from yatt_jax.controller.update import init_state, update
from yatt_jax.models.build import build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.kl import KlPenalty
from yatt_jax.ops.logprobs import logprobs_from_hidden
from yatt_jax.ops.policy import Clip
from yatt_jax.ops.rewards import Shaping
from yatt_jax.ops.select import pack_kept
from yatt_jax.types import Inputs, Logprobs, Max, Metrics, Ratio, Rollout, Values

CONFIG = DecoderConfig(vocab=11, hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp=12)
B, T, V, TEMPERATURE = 6, 10, 11, 0.8
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, V, (B, T))
LENGTHS = np.array([10, 8, 4, 9, 10, 7])
RESPONSES = np.zeros((B, T))  # row 2 is empty, row 3 has two tokens of a tool in the middle
for row, (first, last) in enumerate([(3, 10), (4, 8), (4, 4), (2, 9), (5, 10), (3, 7)]):
    RESPONSES[row, first:last] = 1
RESPONSES[3, 4:6] = 0
ENDED = np.array([True, False, True, True, False, True])
REWARDS = np.array([1.3, -0.4, 5.0, 0.7, np.nan, 2.5])
KEPT = RNG.random((B, T, V)) < 0.5
np.put_along_axis(KEPT, TOKENS[..., None], True, axis=-1)
SAMPLED = -RNG.random((B, T))

HYPERS = {
    "reward": ppo.Hyper(kl=KlPenalty(coef=0.3), gamma=0.97, lam=0.9, clip=Clip(low=0.05, high=0.1), value_clip=0.05),
    "loss": ppo.Hyper(
        kl=KlPenalty(place="loss", estimator="k2", coef=0.3),
        reward=Shaping(scale=2.0, clip=3.0, missing_eos="replace", missing_eos_value=-1.0, whiten_scores=True),
        clip=Clip(low=0.1, high=0.3, dual=1.05),
        aggregation=Aggregation("sequence_mean"),
        value_clip=0.0,
        entropy_coef=0.2,
        whiten_advantages=False,
    ),
    "k3": ppo.Hyper(
        kl=KlPenalty(estimator="k3", coef=0.5),
        reward=Shaping(missing_eos="subtract", missing_eos_value=0.5, mask_truncated=False),
        whiten_rewards=True,
        clip=Clip(low=0.04, high=0.06),
        value_clip=0.02,
        aggregation=Aggregation("fixed_length", 7),
        lam=0.5,
    ),
}


# The decoder in NumPy.


def norm(x, scale):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def turn(x, angle):
    """Rotates the pairs (i, i + K/2) of ``x [T, heads, K]``."""
    a, b = x[..., :2], x[..., 2:]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def decode(p, tokens):
    """Hidden states of one row without padding."""
    length = len(tokens)
    angle = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, 4, 2) / 4)
    x = p["embedding"][tokens]
    for i in range(2):
        attention, mlp = p["layers"]["attention"], p["layers"]["mlp"]
        h = norm(x, p["layers"]["attention_norm"]["scale"][i])
        q, k, v = (np.einsum("td,dhk->thk", h, attention[n]["kernel"][i]) for n in "qkv")
        q, k = turn(q, angle), turn(k, angle)
        scores = np.einsum("thk,sk->hts", q, k[:, 0]) / 2.0
        scores = np.where(np.tril(np.ones((length, length))) > 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hts,sk,hkd->td", weights, v[:, 0], attention["o"]["kernel"][i])
        h = norm(x, p["layers"]["mlp_norm"]["scale"][i])
        gate = h @ mlp["gate"]["kernel"][i]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ mlp["up"]["kernel"][i])) @ mlp["down"]["kernel"][i]
    return norm(x, p["norm"]["scale"])


def policy(params) -> tuple[np.ndarray, np.ndarray]:
    logprobs, entropy = np.zeros((2, B, T))
    for b in range(B):
        hidden = decode(params["decoder"], TOKENS[b, : LENGTHS[b]])
        for t in np.flatnonzero(RESPONSES[b]):
            z = params["decoder"]["embedding"] @ hidden[t - 1] / TEMPERATURE
            p = np.where(KEPT[b, t], np.exp(z - z.max()), 0.0)
            p /= p.sum()
            logprobs[b, t] = np.log(p[TOKENS[b, t]])
            entropy[b, t] = -np.sum(p[p > 0] * np.log(p[p > 0]))
    return logprobs, entropy


def value(params) -> np.ndarray:
    values = np.zeros((B, T))
    for b in range(B):
        hidden = decode(params["decoder"], TOKENS[b, : LENGTHS[b]])
        values[b, 1 : LENGTHS[b]] = (hidden @ params["head"]["kernel"] + params["head"]["bias"])[:-1, 0]
    return values


# PPO in NumPy.


def estimate(d, kind):
    return {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[kind]


def prepared(hyper: ppo.Hyper, old, reference, values) -> dict[str, Any]:
    shaping, valid = hyper.reward, np.isfinite(REWARDS)
    mask = RESPONSES * valid[:, None]
    scores = np.where(valid, REWARDS, 0.0) * shaping.scale
    if shaping.clip:
        scores = np.clip(scores, -shaping.clip, shaping.clip)
    if shaping.missing_eos == "subtract":
        scores = scores - np.where(ENDED, 0.0, shaping.missing_eos_value)
    if shaping.missing_eos == "replace":
        scores = np.where(ENDED, scores, shaping.missing_eos_value)
    if shaping.whiten_scores:
        scores = (scores - scores[valid].mean()) / scores[valid].std() + scores[valid].mean()
    rewards = np.zeros((B, T))
    for b in range(B):
        at = np.flatnonzero(mask[b])
        if len(at):
            rewards[b, at[-1]] = scores[b]
    if hyper.kl.place == "reward":
        rewards -= hyper.kl.coef * estimate(old - reference, hyper.kl.estimator) * mask
    on = mask > 0
    if hyper.whiten_rewards:
        rewards[on] = (rewards[on] - rewards[on].mean()) / rewards[on].std() + rewards[on].mean()
    advantages, returns = np.zeros((2, B, T))
    for b in range(B):
        at, future, after = np.flatnonzero(mask[b]), 0.0, 0.0
        for t in at[::-1]:
            future = rewards[b, t] + hyper.gamma * after - values[b, t] + hyper.gamma * hyper.lam * future
            after = values[b, t]
            advantages[b, t], returns[b, t] = future, future + values[b, t]
    used = advantages.copy()
    if hyper.whiten_advantages:
        used[on] = (used[on] - used[on].mean()) / used[on].std()
    return {
        "mask": mask,
        "scores": scores,
        "valid": valid,
        "raw": advantages,
        "advantages": used,
        "returns": returns,
        "old": old,
        "reference": reference,
        "values": values,
    }


def gathered(hyper: ppo.Hyper, x, mask) -> float:
    rows = [b for b in range(B) if mask[b].sum()]
    if hyper.aggregation.how == "token_mean":
        return x[mask > 0].mean()
    if hyper.aggregation.how == "sequence_mean":
        return float(np.mean([x[b][mask[b] > 0].mean() for b in rows]))
    return sum(x[b][mask[b] > 0].sum() for b in rows) / (len(rows) * hyper.aggregation.length)


def actor_facts(hyper: ppo.Hyper, facts, params) -> dict[str, float]:
    logprobs, entropy = policy(params)
    A, mask, clip = facts["advantages"], facts["mask"], hyper.clip
    on = mask > 0
    ratio = np.exp(logprobs - facts["old"])
    loss = np.maximum(-ratio * A, -np.clip(ratio, 1 - clip.low, 1 + clip.high) * A)
    held = ((A > 0) & (ratio > 1 + clip.high)) | ((A < 0) & (ratio < 1 - clip.low))
    if clip.dual:
        loss = np.where(A < 0, np.minimum(loss, -clip.dual * A), loss)
        held |= (A < 0) & (ratio > clip.dual)
    whole = loss - hyper.entropy_coef * entropy
    if hyper.kl.place == "loss":
        whole = whole + hyper.kl.coef * estimate(logprobs - facts["reference"], hyper.kl.estimator)
    return {
        "loss": gathered(hyper, whole, mask),
        "policy_loss": gathered(hyper, loss, mask),
        "entropy": entropy[on].mean(),
        "ratio_mean": ratio[on].mean(),
        "ratio_max": ratio[on].max(),
        "clip_fraction": held[on].mean(),
        "kl_update": (ratio - 1 - np.log(ratio))[on].mean(),
    }


def critic_facts(hyper: ppo.Hyper, facts, params) -> dict[str, float]:
    v, old, R, mask = value(params), facts["values"], facts["returns"], facts["mask"]
    plain = near = (v - R) ** 2
    if hyper.value_clip:
        near = (np.clip(v, old - hyper.value_clip, old + hyper.value_clip) - R) ** 2
    loss = gathered(hyper, 0.5 * np.maximum(plain, near), mask)
    return {"loss": loss, "value_loss": loss, "value_clip_fraction": (near > plain)[mask > 0].mean()}


# The same with yatt_jax.


@functools.cache
def weights() -> dict[str, Any]:
    """Float32 parameters: the policy and critic that scored the rollout, the reference, and what is updated now."""
    shapes = {"actor": build("lm", CONFIG).abstract, "critic": build("value", CONFIG).abstract}

    def draw(role, seed, near=None, distance=0.0):
        rng = np.random.default_rng(seed)
        if near is not None:
            return jax.tree.map(lambda x: x + distance * rng.normal(size=x.shape).astype("f"), near)
        return jax.tree.map(lambda x: (0.5 * rng.normal(size=x.shape)).astype("f"), shapes[role])

    old, critic = draw("actor", 1), draw("critic", 2)
    return {
        "old": old,
        "reference": draw("actor", 3, old, 0.05),
        "actor": draw("actor", 4, old, 0.03),
        "old_critic": critic,
        "critic": draw("critic", 5, critic, 0.03),
    }


def wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def forward(role, params, rows) -> Any:
    module = build("lm" if role == "actor" else "value", CONFIG).bind(params)
    if role == "critic":
        return Values(jnp.pad(module(rows.inputs)[..., 0][:, :-1], ((0, 0), (1, 0))))
    return logprobs_from_hidden(
        module(rows.inputs)[0],
        module.output_matrix(),
        rows.inputs.tokens,
        temperature=TEMPERATURE,
        kept=rows.kept,
        mask=rows.response_mask,
        capacity=7,
        chunk=8,
    )


def rollout() -> Rollout:
    segments = (np.arange(T) < LENGTHS[:, None]).astype(np.int32)
    return Rollout(
        inputs=Inputs(jnp.asarray(TOKENS), jnp.asarray(segments * np.arange(T)), jnp.asarray(segments)),
        response_mask=jnp.asarray(RESPONSES, jnp.float32),
        sampled_logprobs=jnp.asarray(SAMPLED, jnp.float32),
        plain_logprobs=jnp.zeros((B, T)),
        sample_id=jnp.arange(B),
        group=jnp.arange(B),
        version=jnp.zeros(B, jnp.int32),
        ended=jnp.asarray(ENDED),
        kept=pack_kept(jnp.asarray(KEPT)),
    )


@functools.cache
def scores() -> dict[str, Any]:
    score = {role: jax.jit(functools.partial(forward, role)) for role in ("actor", "critic")}
    w = weights()
    return {
        "actor": score["actor"](w["old"], rollout()),
        "reference": score["actor"](w["reference"], rollout()),
        "critic": score["critic"](w["old_critic"], rollout()),
    }


@functools.cache
def truth() -> dict[str, Any]:
    w = {name: wide(tree) for name, tree in weights().items()}
    return {
        "old": policy(w["old"]),
        "reference": policy(w["reference"])[0],
        "values": value(w["old_critic"]),
    }


@functools.cache
def batch_of(name: str) -> tuple[ppo.Batch, Metrics]:
    prepare, hyper = jax.jit(ppo.prepare, static_argnums=3), HYPERS[name]
    return prepare(rollout(), jnp.asarray(REWARDS, jnp.float32), scores(), hyper, hyper.kl.coef)


def number(metric: Ratio | Max) -> float:
    return float(metric.mean() if isinstance(metric, Ratio) else metric.value)


def test_scores():
    np.testing.assert_allclose(scores()["actor"].logprobs, truth()["old"][0], atol=1e-5)
    np.testing.assert_allclose(scores()["actor"].entropy, truth()["old"][1], atol=1e-5)
    real = np.arange(T) < LENGTHS[:, None]
    np.testing.assert_allclose(scores()["critic"].values * real, truth()["values"], atol=1e-5)


@pytest.mark.parametrize("name", HYPERS)
def test_prepare(name):
    hyper = HYPERS[name]
    expected = prepared(hyper, truth()["old"][0], truth()["reference"], truth()["values"])
    batch, metrics = batch_of(name)
    np.testing.assert_array_equal(batch.response_mask, expected["mask"])
    np.testing.assert_allclose(batch.advantages, expected["advantages"], atol=1e-5)
    np.testing.assert_allclose(batch.returns, expected["returns"], atol=1e-5)
    np.testing.assert_allclose(batch.kl_coef, np.full(B, hyper.kl.coef), atol=1e-7)
    on, all_on = expected["mask"] > 0, RESPONSES > 0
    old, entropy = truth()["old"]
    R, values, k1 = expected["returns"][on], truth()["values"][on], (old - truth()["reference"])[all_on]
    wanted = {
        "reward": np.nanmean(REWARDS),
        "reward_invalid": 1 / B,
        "score": expected["scores"][expected["valid"]].mean(),
        "trained": 5 / B,
        "response_length": RESPONSES.sum() / B,
        "ended": 4 / B,
        "entropy_sampled": entropy[all_on].mean(),
        "probability_difference": np.abs(np.exp(SAMPLED) - np.exp(old))[all_on].mean(),
        "kl_k1": k1.mean(),
        "kl_k3": (np.exp(-k1) - 1 + k1).mean(),
        "kl_response": k1.sum() / B,
        "value": values.mean(),
        "return": R.mean(),
        "advantage": expected["raw"][on].mean(),
        "explained_variance": 1 - np.var(R - values) / np.var(R),
    }
    assert set(metrics) == set(wanted)
    for key, value in wanted.items():
        assert number(metrics[key]) == pytest.approx(value, abs=1e-5), key


def slope(function, params, direction, h=1e-6) -> float:
    def at(step):
        return function(jax.tree.map(lambda p, u: p + step * u, params, direction))

    return (at(h) - at(-h)) / (2 * h)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", HYPERS)
def test_one_update(name, role, one_device):
    hyper = HYPERS[name]
    expected = prepared(hyper, truth()["old"][0], truth()["reference"], truth()["values"])
    batch, _ = batch_of(name)
    facts = functools.partial(actor_facts if role == "actor" else critic_facts, hyper, expected)
    start = weights()[role]
    # Plain gradient descent of rate 1: the step is the gradient.
    config = OptimizerConfig(name="sgd", lr=1.0, schedule="constant", b1=0.0, clip_norm=0.0)
    tx, _ = make_optimizer(config, 1)
    state = init_state(jax.tree.map(lambda x: jax.device_put(x, one_device.replicated), start), tx, one_device)

    @jax.jit
    def run(state, batch):
        loss = functools.partial(ppo.LOSSES[role], hyper=hyper)
        return update(state, batch, forward=functools.partial(forward, role), loss=loss, tx=tx, micro=2)

    new, metrics = run(state, batch)
    gradient = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), start, new.params)
    params = wide(start)
    for key, wanted in facts(params).items():
        assert number(metrics[key]) == pytest.approx(wanted, abs=1e-5), key
    leaves, tree = jax.tree.flatten(gradient)
    assert number(metrics["grad_norm"]) == pytest.approx(np.sqrt(sum(np.sum(g * g) for g in leaves)), rel=1e-4)
    rng = np.random.default_rng(6)
    directions = [[rng.normal(size=g.shape) for g in leaves] for _ in range(3)]
    for i in range(len(leaves)):  # and one entry of every array: its largest
        only = [np.zeros(g.shape) for g in leaves]
        only[i].flat[np.argmax(np.abs(leaves[i]))] = 1.0
        directions.append(only)
    for direction in directions:
        wanted = slope(lambda p: facts(p)["loss"], params, jax.tree.unflatten(tree, direction))
        got = sum(np.sum(g * u) for g, u in zip(leaves, direction, strict=True))
        assert got == pytest.approx(wanted, rel=2e-4, abs=2e-5)


def test_the_cases_reach_every_branch():
    """The update above would prove little if no token were clipped."""
    w = {name: wide(weights()[name]) for name in ("actor", "critic")}
    for name, hyper in HYPERS.items():
        expected = prepared(hyper, truth()["old"][0], truth()["reference"], truth()["values"])
        fraction = actor_facts(hyper, expected, w["actor"])["clip_fraction"]
        assert 0.1 < fraction < 0.9, name
        if hyper.value_clip:
            assert 0.05 < critic_facts(hyper, expected, w["critic"])["value_clip_fraction"] < 0.95, name
    assert isinstance(scores()["actor"], Logprobs)
