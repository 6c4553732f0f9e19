from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from yatt_jax.controller.optimizer import OptimizerConfig, decayed, make_optimizer, make_schedule
from yatt_jax.models.build import build
from yatt_jax.models.config import DecoderConfig


def optimizer(**options) -> Any:
    return make_optimizer(OptimizerConfig(schedule="constant", **options), 10)[0]


def rates(total: int, **options) -> list[float]:
    schedule: Any = make_schedule(OptimizerConfig(lr=1.0, **options), total)
    return [float(schedule(step)) for step in range(total + 2)]


def test_schedules():
    np.testing.assert_allclose(rates(4, schedule="constant"), [1.0] * 6)
    np.testing.assert_allclose(rates(4, schedule="linear"), [1, 0.75, 0.5, 0.25, 0, 0], atol=1e-6)
    np.testing.assert_allclose(rates(4, schedule="linear", min_lr_ratio=0.5), [1, 0.875, 0.75, 0.625, 0.5, 0.5])
    half = np.sqrt(0.5)
    cosine = [1, (1 + half) / 2, 0.5, (1 - half) / 2, 0, 0]
    np.testing.assert_allclose(rates(4, schedule="cosine"), cosine, atol=1e-6)
    floor = [0.1 + 0.9 * value for value in cosine]
    np.testing.assert_allclose(rates(4, schedule="cosine", min_lr_ratio=0.1), floor, atol=1e-6)


def test_warmup_starts_above_zero_and_ends_at_the_peak():
    np.testing.assert_allclose(
        rates(6, schedule="linear", warmup_steps=2), [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0], atol=1e-6
    )
    np.testing.assert_allclose(rates(3, schedule="constant", warmup_steps=1), [1.0] * 5)
    with pytest.raises(ValueError, match="warmup_steps = 6: the run has 6 optimizer steps"):
        rates(6, warmup_steps=6)


def test_the_schedule_follows_the_steps_that_were_taken():
    config = OptimizerConfig(name="sgd", lr=1.0, schedule="linear", b1=0.0, clip_norm=0.0)
    made: Any = make_optimizer(config, 4)
    tx, schedule = made
    params = {"w": jnp.zeros(())}
    state = tx.init(params)
    for step in range(4):
        updates, state = tx.update({"w": jnp.ones(())}, state, params)
        assert float(updates["w"]) == pytest.approx(-float(schedule(step)))


def test_adam_by_hand():
    tx = optimizer(lr=0.1, b1=0.9, b2=0.95, eps=1e-5, weight_decay=0.01, clip_norm=0.0)
    params: Any = {"w": jnp.array([2.0]), "bias": jnp.array([2.0])}
    state = tx.init(params)
    m = v = 0.0
    weight = bias = 2.0
    for step, gradient in enumerate((1.0, -3.0), start=1):
        updates, state = tx.update({"w": jnp.array([gradient]), "bias": jnp.array([gradient])}, state, params)
        params = optax.apply_updates(params, updates)
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        direction = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-5)
        weight, bias = weight - 0.1 * (direction + 0.01 * weight), bias - 0.1 * direction
        np.testing.assert_allclose(params["w"], [weight], atol=1e-6)
        np.testing.assert_allclose(params["bias"], [bias], atol=1e-6)


def test_clipping_limits_the_global_norm():
    tx = optimizer(name="sgd", lr=1.0, b1=0.0, clip_norm=1.0)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    updates, _ = tx.update({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, tx.init(params), params)
    np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [-0.6, -0.8], atol=1e-6)
    updates, _ = tx.update({"a": jnp.array([0.3]), "b": jnp.array([0.4])}, tx.init(params), params)
    np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [-0.3, -0.4], atol=1e-6)


def test_momentum_of_sgd():
    tx = optimizer(name="sgd", lr=1.0, b1=0.5, clip_norm=0.0)
    params = {"w": jnp.zeros(())}
    state = tx.init(params)
    for expected in (-1.0, -1.5, -1.75):
        updates, state = tx.update({"w": jnp.ones(())}, state, params)
        assert float(updates["w"]) == pytest.approx(expected)


def test_norms_and_biases_are_not_decayed():
    config = DecoderConfig(
        vocab=8, hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp=8, qkv_bias=True, qk_norm=True
    )
    for kind in ("lm", "value"):
        abstract = build(kind, config).abstract
        decays = {jax.tree_util.keystr(path): on for path, on in jax.tree_util.tree_leaves_with_path(decayed(abstract))}
        spared = {path for path, on in decays.items() if not on}
        assert all("norm" in path or "bias" in path for path in spared)
        assert all(on or path in spared for path, on in decays.items())
        assert not any(("norm" in path or "bias" in path) and on for path, on in decays.items())
        assert decays["['decoder']['layers']['mlp']['up']['kernel']"]
        assert decays["['decoder']['embedding']"]
        assert "['decoder']['layers']['attention']['q']['bias']" in spared
        assert "['decoder']['layers']['attention']['q_norm']['scale']" in spared


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adamm"}, "name = 'adamm'"),
        ({"lr": -1.0}, "lr = -1.0"),
        ({"eps": 0.0}, "eps = 0.0: must be above 0"),
        ({"b1": 1.0}, "must be below 1"),
        ({"name": "adam", "weight_decay": 0.1}, "weight_decay = 0.1 needs name = 'adamw'"),
        ({"clip_norm": -1.0}, "clip_norm = -1.0"),
    ],
)
def test_faults_name_the_key(options, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        OptimizerConfig(**options)
    assert message in str(error.value)
