"""Losses and gradients of the online algorithms against TRL's, on the same log-probabilities, advantages and masks.

Differences that are choices:

- A row without response tokens weighs nothing here; TRL counts it among the rows that ``grpo`` and ``dr_grpo`` divide
  by. So the rows below all have tokens.
- ``Clip.high`` of CISPO is above 1 (weights up to ``1 + high``), where TRL's ``epsilon_high`` is the bound itself.
- TRL normalises RLOO advantages over rows where asked; here ``advantage.scale`` is of the scores. Neither is a default.
- On-policy distillation here is a policy gradient on sampled tokens, TRL's trainer matches whole distributions.
"""

from __future__ import annotations

import collections
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.algos import cispo, dapo, dr_grpo, grpo, gspo, rloo
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.correction import Correction, importance_weights
from yatt_jax.ops.groups import Advantage, group_advantages
from yatt_jax.ops.kl import KlPenalty
from yatt_jax.ops.policy import Clip
from yatt_jax.ops.rewards import overlong_penalty
from yatt_jax.types import Inputs, Logprobs

B, T, LONGEST = 6, 5, 8
RNG = np.random.default_rng(0)
OLD = RNG.normal(-2, 1, (B, T)).astype(np.float32)
NEW = (OLD + 0.3 * RNG.normal(size=(B, T))).astype(np.float32)
REFERENCE = (OLD + 0.3 * RNG.normal(size=(B, T))).astype(np.float32)
SAMPLER = (OLD + 0.3 * RNG.normal(size=(B, T))).astype(np.float32)
MASK = (np.arange(T) < np.array([5, 3, 1, 4, 5, 2])[:, None]).astype(np.float32)
ADVANTAGES = np.array([1.2, -0.7, 0.4, -1.5, 0.9, -0.3], np.float32)


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def trainers(torch) -> Any:
    """The two trainers' classes; no trainer is made, their loss is called on a stand-in."""
    pytest.importorskip("trl")
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    return {"grpo": GRPOTrainer, "rloo": RLOOTrainer}


def theirs(torch, trainer: Any, inputs: dict[str, Any], **settings: Any) -> tuple[float, np.ndarray]:
    """TRL's loss and its gradient by the log-probabilities."""
    logprobs = torch.tensor(NEW, requires_grad=True)
    accelerator = types.SimpleNamespace(
        num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    stand_in = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros(B, T), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        args=types.SimpleNamespace(delta=settings.pop("delta", None), use_bias_correction_kl=False),
        accelerator=accelerator,
        model=types.SimpleNamespace(training=False),
        max_completion_length=LONGEST,
        use_vllm="importance_sampling_ratio" in inputs,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        **settings,
    )
    tokens = torch.ones(B, T, dtype=torch.long)
    common = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": tokens[:, :1],
        "completion_ids": tokens,
        "completion_mask": torch.tensor(MASK),
        "advantages": torch.tensor(ADVANTAGES),
        "num_items_in_batch": torch.tensor(MASK.sum()),
    }
    loss = trainer._compute_loss(stand_in, None, common | inputs)
    loss.backward()
    return float(loss.detach()), logprobs.grad.numpy()


def ours(algo: Any, hyper: Any, correction: Any = None) -> tuple[float, np.ndarray]:
    table = jnp.ones((B, T), jnp.int32)
    batch = algo.Batch(
        inputs=Inputs(table, table, table),
        response_mask=jnp.asarray(MASK),
        kept=None,
        old_logprobs=jnp.asarray(OLD),
        reference_logprobs=jnp.asarray(REFERENCE) if hyper.kl.place == "loss" else None,
        correction=correction,
        advantages=jnp.asarray(ADVANTAGES[:, None] * MASK),
        kl_coef=jnp.full(B, hyper.kl.coef),
    )

    def loss(logprobs):
        return algo.LOSSES["actor"](Logprobs(logprobs, jnp.zeros((B, T))), batch, hyper)[0].mean()

    value, slope = jax.value_and_grad(loss)(jnp.asarray(NEW))
    return float(value), np.asarray(slope)


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grpo": (grpo, grpo.Hyper(), {"loss_type": "grpo", "beta": 0.04}),
    "grpo without a reference": (grpo, grpo.Hyper(kl=KlPenalty("none")), {"loss_type": "grpo"}),
    "dual clip": (grpo, grpo.Hyper(kl=KlPenalty("none"), clip=Clip(dual=1.3)), {"loss_type": "grpo", "delta": 1.3}),
    "dr_grpo": (
        dr_grpo,
        dr_grpo.Hyper(aggregation=Aggregation("fixed_length", LONGEST)),
        {"loss_type": "dr_grpo"},
    ),
    "gspo": (
        gspo,
        gspo.Hyper(),
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    "gspo, wide clip": (
        gspo,
        gspo.Hyper(clip=Clip(low=0.1, high=0.1, level="sequence_mean")),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1},
    ),
    "cispo": (cispo, cispo.Hyper(), {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo, clipped": (
        cispo,
        cispo.Hyper(clip=Clip(low=1.0, high=0.1, how="weight")),
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "dapo": (dapo, dapo.Hyper(), {"loss_type": "dapo", "epsilon_high": 0.28}),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(torch, trainers, name):
    algo, hyper, settings = CASES[name]
    defaults = {"importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2}
    inputs = {"old_per_token_logps": torch.tensor(OLD), "ref_per_token_logps": torch.tensor(REFERENCE)}
    value, slope = theirs(torch, trainers["grpo"], inputs, **(defaults | settings))
    got, got_slope = ours(algo, hyper)
    assert got == pytest.approx(value, abs=1e-5)
    np.testing.assert_allclose(got_slope, slope, atol=1e-5)
    assert np.abs(slope).max() > 1e-3


def test_rloo(torch, trainers):
    inputs = {"old_logps": torch.tensor((OLD * MASK).sum(1))}
    value, slope = theirs(torch, trainers["rloo"], inputs, epsilon_low=0.2, epsilon_high=0.2)
    got, got_slope = ours(rloo, rloo.Hyper(kl=KlPenalty("none")))
    assert got == pytest.approx(value, abs=1e-5)
    np.testing.assert_allclose(got_slope, slope, atol=1e-5)
    assert np.abs(slope).max() > 1e-3


@pytest.mark.parametrize("how", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence_product"])
def test_correction(torch, trainers, how, level):
    """Its weights by TRL's formula in torch, and their place in the loss by TRL's loss, with a divergence beside it."""
    apart = torch.tensor((OLD - SAMPLER) * MASK)
    ratio = torch.exp(apart.sum(dim=-1, keepdim=True) if level != "token" else apart)
    weights = torch.clamp(ratio, max=1.2) if how == "truncate" else ratio.masked_fill(ratio > 1.2, value=0.0)
    inputs = {
        "old_per_token_logps": torch.tensor(OLD),
        "ref_per_token_logps": torch.tensor(REFERENCE),
        "importance_sampling_ratio": weights,
    }
    settings = {"importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2}
    value, slope = theirs(torch, trainers["grpo"], inputs, loss_type="grpo", beta=0.04, **settings)
    options = Correction(how, level, 1.2)
    held, _ = importance_weights(jnp.asarray(OLD), jnp.asarray(SAMPLER), jnp.asarray(MASK), options)
    got, got_slope = ours(grpo, grpo.Hyper(correction=options), held)
    assert got == pytest.approx(value, abs=1e-5)
    np.testing.assert_allclose(got_slope, slope, atol=1e-5)


@pytest.mark.parametrize("options", [Advantage(), Advantage(scale="none"), Advantage(scale="batch_std")], ids=str)
def test_group_advantages(torch, trainers, options):
    """By the helper that TRL takes standard deviations with, a missing reward among them."""
    from trl.trainer.utils import nanstd

    rewards = np.array([[1.0, 0.0, np.nan, 1.0], [0.3, 0.3, 0.3, 0.3], [2.0, -1.0, 0.5, 0.25]], np.float32)
    x = torch.tensor(rewards)
    apart = x - torch.nanmean(x, dim=1, keepdim=True)
    std = {"group_std": nanstd(x, dim=1, keepdim=True), "batch_std": nanstd(x.flatten())}.get(options.scale)
    expected = torch.nan_to_num(apart if std is None else apart / (std + 1e-4), nan=0.0)
    flat = rewards.reshape(-1)
    counts = jnp.asarray(np.isfinite(flat), jnp.float32)
    got = group_advantages(jnp.asarray(flat), jnp.repeat(jnp.arange(3), 4), counts, options)
    # A group of equal rewards is exactly 0 here; there, a rounding error of the mean over 1e-4.
    np.testing.assert_allclose(got, expected.numpy().reshape(-1), atol=1e-3)
    not_equal = np.r_[0:4, 8:12]
    np.testing.assert_allclose(np.asarray(got)[not_equal], expected.numpy().reshape(-1)[not_equal], atol=1e-5)


def test_overlong_penalty(torch):
    rewards = pytest.importorskip("trl.rewards")
    lengths = [0, 70, 79, 80, 81, 90, 99, 100, 101, 300]
    expected = rewards.get_soft_overlong_punishment(100, 20)(completion_ids=[[1] * n for n in lengths])
    np.testing.assert_allclose(overlong_penalty(jnp.asarray(lengths), 100, 20), expected, atol=1e-6)
