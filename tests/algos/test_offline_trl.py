"""Losses and gradients of the offline algorithms against TRL's, on the same log-probabilities, rewards and masks.

Differences that are choices:

- TRL's IPO compares log-probabilities a token; here that is ``length_average = True``, and off by default as in the
  paper.
- TRL's ORPO counts the prompt in its likelihood; here it is that of the response (see ``algos.orpo``).
- cDPO (``label_smoothing``), RPO and the scaled Bradley-Terry loss have no counterpart there; their values are in
  ``tests/ops/test_preference.py`` and below.
"""

from __future__ import annotations

import collections
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.algos import dpo, kto, orpo, reward_model, sft, simpo
from yatt_jax.ops.pairs import PairBatch
from yatt_jax.types import Inputs, Logprobs, PairRows, TextRows, TokenScores, UnpairedRows

B, T = 4, 7
RNG = np.random.default_rng(0)
# Log-probabilities of pairs [B, 2, T]; prompts of one to three tokens, responses of one to four.
MASK = np.zeros((B, 2, T), np.float32)
SEGMENTS = np.zeros((B, 2, T), np.int32)
for b in range(B):
    for side, length in enumerate(RNG.integers(1, 5, 2)):
        prompt = 1 + b % 3
        MASK[b, side, prompt : prompt + length] = 1
        SEGMENTS[b, side, : prompt + length] = 1
NEW = (RNG.normal(-2, 0.7, MASK.shape) * MASK).astype(np.float32)
REFERENCE = (NEW + 0.4 * RNG.normal(size=MASK.shape) * MASK).astype(np.float32)
GAP = np.array([0.5, 1.0, 2.0, 0.25], np.float32)
INPUTS = Inputs(jnp.asarray(SEGMENTS), jnp.broadcast_to(jnp.arange(T), MASK.shape), jnp.asarray(SEGMENTS))


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def trl(torch) -> Any:
    return pytest.importorskip("trl")


def stand_in(torch, **settings: Any) -> Any:
    """A trainer that was never made: what its loss reads of itself."""
    same = lambda x: x  # noqa: E731
    return types.SimpleNamespace(
        accelerator=types.SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same, parallelism_config=None),
        model=types.SimpleNamespace(training=False),
        args=types.SimpleNamespace(
            gradient_checkpointing_kwargs=None,
            center_rewards_coefficient=None,
            loss_type="nll",
            average_tokens_across_devices=False,
        ),
        aux_loss_enabled=False,
        _total_train_tokens=0,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        **settings,
    )


def outputs(torch, logprobs: Any) -> Any:
    """What TRL's models give: values of the tokens after the first."""
    zeros = torch.zeros_like(logprobs)
    return types.SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)


def stacked(torch, values: np.ndarray) -> Any:
    """``[B, 2, T]`` as TRL has it, ``[2 B, T]``: all chosen ones first."""
    return torch.tensor(np.concatenate([values[:, 0], values[:, 1]]))


def unstacked(values: np.ndarray) -> np.ndarray:
    return np.stack(np.split(values, 2), axis=1)


def ours(algo: Any, hyper: Any, reference: np.ndarray | None = None) -> tuple[float, np.ndarray]:
    """Loss and gradient by the log-probabilities."""
    total = None if reference is None else jnp.asarray((reference * MASK).sum(-1))
    batch = PairBatch(INPUTS, jnp.asarray(MASK), total, jnp.asarray(GAP), jnp.ones(B))

    def loss(logprobs):
        return algo.LOSSES["actor"](Logprobs(logprobs, jnp.zeros(MASK.shape)), batch, hyper)[0].mean()

    value, slope = jax.value_and_grad(loss)(jnp.asarray(NEW))
    return float(value), np.asarray(slope)


def check(mine: tuple[float, np.ndarray], theirs: tuple[float, np.ndarray]) -> None:
    assert mine[0] == pytest.approx(theirs[0], abs=1e-5)
    assert np.abs(theirs[1]).max() > 1e-4
    np.testing.assert_allclose(mine[1], theirs[1], atol=1e-5)


def test_sft(torch, trl) -> None:
    """A mean over all trained tokens, of rows of different lengths."""
    from trl.trainer.sft_trainer import SFTTrainer

    mask, inputs = MASK[:, 0], jax.tree.map(lambda x: x[:, 0], INPUTS)
    batch, _ = sft.prepare(TextRows(inputs, jnp.asarray(mask), jnp.ones(B)), {}, sft.Hyper())

    def value(logprobs):
        return sft.loss(Logprobs(logprobs, jnp.zeros((B, T))), batch, sft.Hyper())[0].mean()

    mine = jax.value_and_grad(value)(jnp.asarray(NEW[:, 0]))
    logprobs, counted = torch.tensor(NEW[:, 0, 1:], requires_grad=True), torch.tensor(mask[:, 1:])
    made = outputs(torch, logprobs * counted)
    made.label_mask = counted
    trainer = stand_in(torch, compute_loss_func=None, label_smoother=None)
    model: Any = lambda **_: made  # noqa: E731
    theirs: Any = SFTTrainer.compute_loss(trainer, model, {"labels": None})
    theirs.backward()
    slope = np.zeros_like(NEW[:, 0])
    slope[:, 1:] = logprobs.grad.numpy()
    check((float(mine[0]), np.asarray(mine[1])), (float(theirs.detach()), slope))


@pytest.mark.parametrize(
    ("hyper", "settings"),
    [
        (dpo.Hyper(), {"loss_types": ["sigmoid"]}),
        (dpo.Hyper(beta=0.5, length_average=True), {"loss_types": ["sigmoid_norm"], "beta": 0.5}),
        (dpo.Hyper(loss="ipo", length_average=True), {"loss_types": ["ipo"]}),
    ],
    ids=["dpo", "by length", "ipo"],
)
def test_dpo(torch, trl, hyper: dpo.Hyper, settings: dict[str, Any]) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    logprobs = stacked(torch, NEW[..., 1:]).requires_grad_()
    reference = stacked(torch, REFERENCE[..., 1:])
    trainer = stand_in(
        torch,
        ld_alpha=None,
        precompute_ref_logps=False,
        ref_model=lambda **_: outputs(torch, reference),
        f_divergence_type="reverse_kl",
        label_smoothing=0.0,
        loss_weights=[1.0],
        use_weighting=False,
        **({"beta": 0.1} | settings),
    )
    trainer.model = types.SimpleNamespace(training=False)
    mask = stacked(torch, MASK).long()
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl.trainer.dpo_trainer.disable_gradient_checkpointing", lambda *_: torch.no_grad())
        patch.setattr("trl.trainer.dpo_trainer.is_peft_model", lambda _: False)
        loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs(torch, logprobs), inputs, False)
    loss.backward()
    slope = np.zeros_like(NEW)
    slope[..., 1:] = unstacked(logprobs.grad.numpy())
    check(ours(dpo, hyper, REFERENCE), (float(loss.detach()), slope * MASK))


def test_simpo(torch, trl) -> None:
    cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    logprobs = torch.tensor(NEW, requires_grad=True)
    means = (logprobs * torch.tensor(MASK)).sum(-1) / torch.tensor(MASK).sum(-1)
    trainer = stand_in(torch, alpha=0.0, beta=2.0, simpo_gamma=0.5, label_smoothing=0.0, loss_type="simpo")
    loss = cpo.CPOTrainer.cpo_loss(trainer, means[:, 0], means[:, 1])[0].mean()
    loss.backward()
    check(ours(simpo, simpo.Hyper()), (float(loss.detach()), logprobs.grad.numpy()))


@pytest.mark.parametrize("sft_coef", [0.0, 1.0])
def test_orpo(torch, trl, sft_coef: float) -> None:
    theirs = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    logprobs, mask = torch.tensor(NEW, requires_grad=True), torch.tensor(MASK)
    means = (logprobs * mask).sum(-1) / mask.sum(-1)
    gain = theirs.ORPOTrainer.odds_ratio_loss(stand_in(torch, beta=0.1), means[:, 0], means[:, 1])[0]
    loss = -gain.mean() - sft_coef * means[:, 0].mean()
    loss.backward()
    check(ours(orpo, orpo.Hyper(sft_coef=sft_coef)), (float(loss.detach()), logprobs.grad.numpy()))


@pytest.mark.parametrize("shift", [-0.5, 0.5], ids=["divergence clamped at 0", "divergence above 0"])
def test_kto(torch, trl, shift: float) -> None:
    from trl.trainer.kto_trainer import KTOTrainer

    # Index 0 is the row's own response, index 1 that of another row.
    new = NEW + shift * MASK
    desirable = np.array([True, False, True, False])
    rows = UnpairedRows(INPUTS, jnp.asarray(MASK), jnp.asarray(desirable), jnp.ones(B))
    hyper = kto.Hyper(desirable_weight=1.5, undesirable_weight=0.5)
    scores = {"actor": jnp.asarray(new.sum(-1)), "reference": jnp.asarray(REFERENCE.sum(-1))}
    batch, metrics = kto.prepare(rows, scores, hyper)
    used: Any = metrics["kl"]

    def loss(logprobs):
        return kto.loss(Logprobs(logprobs, jnp.zeros((B, T))), batch, hyper)[0].mean()

    value, slope = jax.value_and_grad(loss)(jnp.asarray(new[:, 0]))

    own = torch.tensor(new[:, 0, 1:], requires_grad=True)
    mask, other = torch.tensor(MASK[:, 0]).long(), torch.tensor(MASK[:, 1]).long()

    def model(values: Any, others: np.ndarray) -> Any:
        """Gives the log-probabilities of the rows' own responses, or of the others'."""
        return lambda **named: outputs(
            torch, torch.tensor(others[..., 1:]) if torch.equal(named["input_ids"], other) else values
        )

    reference = model(torch.tensor(REFERENCE[:, 0, 1:]), REFERENCE[:, 1])
    settings = {"beta": 0.1, "loss_type": "kto", "calculate_KL": True, "precompute_ref_logps": False}
    trainer = stand_in(torch, desirable_weight=1.5, undesirable_weight=0.5, ref_model=reference, **settings)
    trainer._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(trainer, model, batch)
    assert not torch.equal(mask, other)
    inputs = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "KL_input_ids": other,
        "KL_attention_mask": other,
        "KL_completion_mask": other,
        "label": torch.tensor(desirable),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl.trainer.kto_trainer.disable_gradient_checkpointing", lambda *_: torch.no_grad())
        patch.setattr("trl.trainer.kto_trainer.is_peft_model", lambda _: False)
        theirs = KTOTrainer._compute_loss(trainer, model(own, new[:, 1]), inputs, False)
    theirs.backward()
    found = np.zeros_like(NEW[:, 0])
    found[:, 1:] = own.grad.numpy()
    check((float(value), np.asarray(slope)), (float(theirs.detach()), found * MASK[:, 0]))
    assert float(used.mean()) == pytest.approx(trainer._metrics["eval"]["kl"][0], abs=1e-6)
    assert (float(used.mean()) > 0) == (shift > 0)


@pytest.mark.parametrize(("loss", "center"), [("plain", 0.0), ("plain", 0.1), ("margin", 0.0)])
def test_reward_model(torch, trl, loss: str, center: float) -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    scores = RNG.normal(size=(B, 2)).astype(np.float32)
    rows = PairRows(INPUTS, jnp.asarray(MASK), jnp.asarray(GAP), jnp.ones(B))
    hyper = reward_model.Hyper(loss=loss, center_coef=center)  # type: ignore[arg-type]

    def value(at_end):
        everywhere = jnp.broadcast_to(at_end[..., None, None], (*MASK.shape, 1))
        return reward_model.loss(TokenScores(everywhere), rows, hyper)[0].mean()

    mine = jax.value_and_grad(value)(jnp.asarray(scores))
    logits = stacked(torch, scores).requires_grad_()
    trainer = stand_in(torch)
    trainer.args.center_rewards_coefficient = center or None
    inputs = {"attention_mask": stacked(torch, MASK)} | ({"margin": torch.tensor(GAP)} if loss == "margin" else {})
    model: Any = lambda **_: types.SimpleNamespace(logits=logits)  # noqa: E731
    found: Any = RewardTrainer.compute_loss(trainer, model, inputs)
    found.backward()
    check((float(mine[0]), np.asarray(mine[1])), (float(found.detach()), unstacked(logits.grad.numpy())))


# Values of NUMERICS: chosen log-ratio 1, rejected -.5, true difference 1.5, beta .1.
VALUES = [
    (dpo, dpo.Hyper(), (1.0, -0.5), 0.620957),
    (dpo, dpo.Hyper(label_smoothing=0.1), (1.0, -0.5), 0.635957),
    (dpo, dpo.Hyper(loss="ipo"), (1.0, -0.5), 12.25),
    (dpo, dpo.Hyper(loss="rpo_squared"), (1.0, -0.5), 1.8225),
    (dpo, dpo.Hyper(loss="rpo_backward_kl"), (1.0, -0.5), 0.173269),
    (dpo, dpo.Hyper(loss="rpo_forward_kl"), (1.0, -0.5), 0.204926),
    (simpo, simpo.Hyper(), (-1.2, -1.7), 0.474077),
    (orpo, orpo.Hyper(beta=1.0, sft_coef=0.0), (-1.2, -1.7), 0.417778),
]


@pytest.mark.parametrize(("algo", "hyper", "sums", "expected"), VALUES)
def test_values(algo: Any, hyper: Any, sums: tuple[float, float], expected: float) -> None:
    ones = jnp.ones((1, 2, 2), jnp.int32)
    mask = jnp.asarray([[[0.0, 1.0]] * 2])
    reference = jnp.zeros((1, 2)) if algo is dpo else None
    batch = PairBatch(Inputs(ones, jnp.asarray([[[0, 1]] * 2]), ones), mask, reference, jnp.full(1, 1.5), jnp.ones(1))
    logprobs = jnp.asarray(sums)[None, :, None] * mask
    found, metrics = algo.loss(Logprobs(logprobs, jnp.zeros_like(mask)), batch, hyper)
    assert float(found.mean()) == pytest.approx(expected, abs=1e-6 * max(1, abs(expected)))
    assert float(metrics["accuracy"].mean()) == 1


@pytest.mark.parametrize(
    ("loss", "gap", "expected"), [("plain", 0, 0.341154), ("margin", 1, 0.744397), ("scaled", 2, 0.682308)]
)
def test_bradley_terry_values(loss: Any, gap: float, expected: float) -> None:
    ones = jnp.ones((1, 2, 2), jnp.int32)
    rows = PairRows(Inputs(ones, ones, ones), jnp.ones((1, 2, 2)), jnp.full(1, float(gap)), jnp.ones(1))
    scores = TokenScores(jnp.asarray([[[[9.0], [1.3]], [[9.0], [0.4]]]]))
    found, _ = reward_model.loss(scores, rows, reward_model.Hyper(loss=loss))
    assert float(found.mean()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("wanted", "sum_", "expected"), [(True, 1.0, 0.482507), (False, -0.5, 0.480011)])
def test_kto_values(wanted: bool, sum_: float, expected: float) -> None:
    ones, mask = jnp.ones((1, 2), jnp.int32), jnp.asarray([[0.0, 1.0]])
    batch = kto.Batch(
        inputs=Inputs(ones, ones, ones),
        mask=mask,
        desirable=jnp.asarray([wanted]),
        reference=jnp.zeros(1),
        divergence=jnp.full(1, 0.3),
        weight=jnp.ones(1),
    )
    found, _ = kto.loss(Logprobs(sum_ * mask, jnp.zeros((1, 2))), batch, kto.Hyper())
    assert float(found.mean()) == pytest.approx(expected, abs=1e-6)
