"""The decoder: cached decoding, leading axes, packing, soft caps, heads, remat and mixed precision."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.models.build import build
from yatt_jax.models.config import DecoderConfig, Rope
from yatt_jax.models.decoder import Cache
from yatt_jax.parallel.partition import Split, make_partitions
from yatt_jax.types import Inputs

# Every switch that a cache could get wrong: grouped heads, two windows, two ropes, norms, soft caps.
CONFIG = DecoderConfig(
    vocab=48,
    hidden=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=40,
    qkv_bias=True,
    qk_norm=True,
    post_norms=True,
    norm_offset=True,
    windows=(0, 4, 6),
    ropes=(Rope(), Rope(100.0)),
    rope_of_layer=(0, 1, 1),
    attention_softcap=5.0,
    final_softcap=3.0,
)
B, T = 3, 12


@pytest.fixture(scope="module")
def lm(one_device):
    model = build("lm", CONFIG)
    return model, model.init(0, one_device)


def row_inputs(tokens) -> Inputs:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
    return Inputs(tokens, positions, jnp.ones_like(positions))


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 48, (B, T)))


@pytest.fixture(scope="module")
def full(lm):
    model, params = lm
    run = jax.jit(lambda params, inputs: model.bind(params)(inputs)[0])
    return run, run(params, row_inputs(TOKENS))


@pytest.fixture(scope="module")
def cached(lm):
    model, _ = lm
    return jax.jit(lambda params, inputs, cache, start: model.bind(params)(inputs, cache, start), donate_argnums=2)


def test_cached_decoding_equals_the_full_pass(lm, full, cached):
    _, params = lm
    lengths = np.array([3, 5, 4])  # ragged prompts, padded to 5; each row then goes on at its own slot
    inputs = row_inputs(TOKENS)
    prompt = jax.tree.map(lambda x: x[:, :5], inputs)
    hidden, cache = cached(params, prompt, Cache.zeros(CONFIG, B, 16), jnp.zeros(B, int))
    expected = np.asarray(full[1])
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(hidden[row, :length], expected[row, :length], atol=1e-5)
    for step in range(T - 5):
        at = jnp.asarray(lengths + step)
        one = Inputs(jnp.take_along_axis(TOKENS, at[:, None], 1), at[:, None], jnp.ones((B, 1), int))
        hidden, cache = cached(params, one, cache, at)
        for row in range(B):
            np.testing.assert_allclose(hidden[row, 0], expected[row, lengths[row] + step], atol=1e-5)


def test_prefill_in_pieces(lm, full, cached):
    _, params = lm
    cache = Cache.zeros(CONFIG, B, T)
    for start in range(0, T, 4):
        piece = jax.tree.map(lambda x, s=start: x[:, s : s + 4], row_inputs(TOKENS))
        hidden, cache = cached(params, piece, cache, jnp.full(B, start))
        np.testing.assert_allclose(hidden, full[1][:, start : start + 4], atol=1e-5)


def test_padding_past_the_end_of_the_cache_is_dropped(lm, full, cached):
    _, params = lm
    piece = jax.tree.map(lambda x: x[:, :8], row_inputs(TOKENS))
    hidden, cache = cached(params, piece, Cache.zeros(CONFIG, B, 6), jnp.zeros(B, int))
    np.testing.assert_allclose(hidden[:, :6], full[1][:, :6], atol=1e-5)
    assert np.isfinite(np.asarray(hidden)).all()
    assert cache.keys.shape[3] == 6


def test_layers_one_by_one_equal_the_scan(lm, full):
    model, params = lm

    @jax.jit
    def run(params, inputs):
        module = model.bind(params)
        caches = tuple(Cache.zeros(dataclasses.replace(CONFIG, layers=1, windows=(0,), rope_of_layer=(0,)), B, T)
                       for _ in range(CONFIG.layers))  # fmt: skip
        return module(inputs, caches, None, module.decoder.blocks(module.decoder.unstack()))[0]

    np.testing.assert_allclose(run(params, row_inputs(TOKENS)), full[1], atol=1e-5)


def test_a_cache_holds_two_buffers():
    cache = Cache.zeros(CONFIG, 2, 4)
    jax.jit(lambda c: c, donate_argnums=0)(cache)  # donating one buffer twice would raise
    assert cache.keys.is_deleted()


def test_leading_axes(lm, full):
    _, params = lm
    pairs = jax.tree.map(lambda x: jnp.stack([x, x[::-1]], 1), row_inputs(TOKENS))
    hidden = full[0](params, pairs)
    assert hidden.shape == (B, 2, T, 32)
    np.testing.assert_allclose(hidden[:, 0], full[1], atol=1e-5)
    np.testing.assert_allclose(hidden[:, 1], full[1][::-1], atol=1e-5)
    single = full[0](params, jax.tree.map(lambda x: x[0], row_inputs(TOKENS)))
    np.testing.assert_allclose(single, full[1][0], atol=1e-5)


def test_packed_rows_do_not_see_each_other(lm, full):
    _, params = lm
    segments = jnp.asarray([[1] * 5 + [2] * 4 + [0] * 3])
    positions = jnp.asarray([[*range(5), *range(4), 0, 0, 0]])
    packed = full[0](params, Inputs(TOKENS[:1], positions, segments))
    for start, stop in [(0, 5), (5, 9)]:
        alone = full[0](params, row_inputs(TOKENS[:1, start:stop]))
        np.testing.assert_allclose(packed[:, start:stop], alone, atol=1e-5)
    assert np.isfinite(np.asarray(packed)).all()


def test_remat_changes_no_gradient(lm):
    model, params = lm
    again = build("lm", dataclasses.replace(CONFIG, remat="full"))

    def loss(model, params):
        return (model.bind(params)(row_inputs(TOKENS))[0] ** 2).mean()

    plain, remat = (jax.jit(jax.grad(partial(loss, m)))(params) for m in (model, again))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), plain, remat)


def test_bfloat16_compute_stays_near_float32(lm, full):
    _, params = lm
    half = build("lm", dataclasses.replace(CONFIG, dtype="bfloat16"))

    @jax.jit
    def run(params, inputs):
        module = half.bind(params)
        hidden, _ = module(inputs)
        return hidden, module.logits(hidden)

    hidden, logits = run(params, row_inputs(TOKENS))
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    error = np.abs(np.asarray(hidden, np.float32) - np.asarray(full[1])).mean()
    assert 0 < error < 0.05


def test_final_softcap(lm, full):
    model, params = lm
    logits = np.asarray(model.bind(params).logits(full[1]))
    plain = np.asarray(full[1]) @ np.asarray(params["decoder"]["embedding"]).T
    np.testing.assert_allclose(logits, 3 * np.tanh(plain / 3), atol=1e-5)


def test_heads_of_critic_and_reward_model(one_device):
    critic = build("value", CONFIG)
    params = critic.init(0, one_device)
    values = jax.jit(lambda p, i: critic.bind(p)(i))(params, row_inputs(TOKENS))
    assert values.shape == (B, T, 1)
    assert values.dtype == jnp.float32
    np.testing.assert_array_equal(values, 0)
    reward = build("reward", CONFIG, labels=9)
    head = reward.init(0, one_device)["head"]
    assert head.keys() == {"kernel"}
    assert head["kernel"].shape == (32, 9)
    assert float(head["kernel"].std()) == pytest.approx(33**-0.5, rel=0.15)


def test_parameters_and_outputs_on_eight_devices_equal_one(lm, full):
    model, params = lm
    train, rollout = make_partitions(Split(1, 4, 2), Split(4, 1, 2))
    for partition in (train, rollout):
        drawn = model.init(0, partition)
        jax.tree.map(np.testing.assert_array_equal, drawn, params)

        def run(params, inputs, partition=partition):
            with partition.active():
                return model.bind(params)(inputs)[0]

        hidden = jax.jit(run)(drawn, jax.device_put(row_inputs(TOKENS), partition.replicated))
        np.testing.assert_allclose(hidden, full[1], atol=1e-5)
    assert "m2_8" in str(train.spec(("embed", "mlp"), (32, 40)))


def test_fresh_parameters(lm, one_device):
    model, params = lm
    kernel = np.asarray(params["decoder"]["layers"]["mlp"]["up"]["kernel"])  # [3, 32, 40]
    assert kernel.std() == pytest.approx(32**-0.5, rel=0.05)
    assert abs(np.corrcoef(kernel[0].ravel(), kernel[1].ravel())[0, 1]) < 0.1
    assert not np.array_equal(kernel, model.init(1, one_device)["decoder"]["layers"]["mlp"]["up"]["kernel"])
    np.testing.assert_array_equal(params["decoder"]["norm"]["scale"], 0)  # norms multiply by 1 + weight here
    half = model.init(0, one_device, "bfloat16")["decoder"]["layers"]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(half, kernel.astype(jnp.bfloat16))


def test_uneven_heads():
    with pytest.raises(ValueError, match="heads = 4 is not a multiple of kv_heads = 3"):
        dataclasses.replace(CONFIG, kv_heads=3)
    with pytest.raises(ValueError, match="head_dim = 7 must be even"):
        dataclasses.replace(CONFIG, head_dim=7)
    with pytest.raises(ValueError, match="windows has 2 entries for 3 layers"):
        dataclasses.replace(CONFIG, windows=(1, 2))
