"""What algorithms that compare two responses share: rows on their way to a batch, and sums of the batch's losses."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from yatt_jax.ops import options
from yatt_jax.ops.documents import trained_tokens
from yatt_jax.ops.masking import masked_ratio, masked_sum
from yatt_jax.ops.options import NotNegative, Positive
from yatt_jax.types import Inputs, Logprobs, Metrics, PairRows, Ratio


class MaskedRows(Protocol):
    """Rows of one document each, with a weight."""

    @property
    def inputs(self) -> Inputs: ...  # noqa: D102
    @property
    def mask(self) -> Float[Array, "B *P T"]: ...  # noqa: D102
    @property
    def weight(self) -> Float[Array, "B"]: ...  # noqa: D102


@dataclasses.dataclass(frozen=True)
class PreferenceHyper:
    """Settings that algorithms of preferences share; each adds its own and gives its own defaults."""

    beta: Positive = 0.1  # reward of a nat
    length_average: bool = False  # responses are compared by their log-probability a token, not by the whole
    sft_coef: NotNegative = 0.0  # of what is added: minus the log-probability of the chosen response, a token

    def __post_init__(self) -> None:
        options.check(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairBatch:
    """Pairs to train on; rows of zeros weigh nothing.

    Attributes:
      inputs: prompt and response, chosen first.
      mask: 1 at the tokens that are trained.
      reference: log-probability of each whole response by the frozen reference, where there is one.
      gap: see ``PairRows``.
      weight: of the pair.
    """

    inputs: Inputs
    mask: Float[Array, "B 2 T"]
    reference: Float[Array, "B 2"] | None
    gap: Float[Array, "B"]
    weight: Float[Array, "B"]


def summary(outputs: Logprobs, rows: MaskedRows) -> Float[Array, "B *P"]:
    """What ``prepare`` reads of a frozen model's scores: one number a response, little to keep on disk."""
    return masked_sum(outputs.logprobs, trained_tokens(rows.inputs, rows.mask, rows.weight), axis=-1)


def by_length(total: Float[Array, "*B"], mask: Float[Array, "*B T"], average: bool) -> Float[Array, "*B"]:
    """A sum over tokens, or the mean over those that count (0 where there are none)."""
    return total / jnp.maximum(jnp.sum(mask, axis=-1), 1.0) if average else total


def prepare(
    rows: PairRows, scores: dict[str, Float[Array, "B 2"]], hyper: PreferenceHyper
) -> tuple[PairBatch, Metrics]:
    """Pairs with the scores of the reference, if it was asked.

    Args:
      rows: the pairs.
      scores: role -> ``summary`` of its scores.
      hyper: the algorithm's settings.

    Returns:
      The batch, with ``response_length_chosen`` and ``response_length_rejected`` (tokens).
    """
    del hyper
    mask = trained_tokens(rows.inputs, rows.mask, rows.weight)
    lengths = jnp.sum(mask, axis=-1)
    metrics: Metrics = {
        "response_length_chosen": weighted(lengths[:, 0], rows.weight),
        "response_length_rejected": weighted(lengths[:, 1], rows.weight),
    }
    return PairBatch(rows.inputs, mask, scores.get("reference"), rows.gap, rows.weight), metrics


def weighted(x: Float[Array, "B"], weight: Float[Array, "B"]) -> Ratio:
    """The mean of x by weight; where the weight is 0, what stands there does not matter."""
    return Ratio(masked_sum(x * weight, weight), jnp.sum(weight))


def log_ratios(outputs: Logprobs, batch: PairBatch, hyper: PreferenceHyper) -> Float[Array, "B 2"]:
    """``log pi - log pi_reference`` of the chosen and the rejected response, or ``log pi`` without a reference."""
    total = masked_sum(outputs.logprobs, batch.mask, axis=-1)
    if batch.reference is not None:
        total = total - batch.reference
    return by_length(total, batch.mask, hyper.length_average)


def loss(
    losses: Float[Array, "B"],
    ratios: Float[Array, "B 2"],
    outputs: Logprobs,
    batch: PairBatch,
    hyper: PreferenceHyper,
) -> tuple[Ratio, Metrics]:
    """``total`` of responses whose reward is ``beta`` times their log-ratio."""
    return total(losses, hyper.beta * ratios, outputs, batch, hyper.sft_coef)


class WeighedPairs(Protocol):
    """Pairs with a weight; see ``PairBatch``."""

    @property
    def mask(self) -> Float[Array, "B 2 T"]: ...  # noqa: D102
    @property
    def weight(self) -> Float[Array, "B"]: ...  # noqa: D102


def total(
    losses: Float[Array, "B"],
    rewards: Float[Array, "B 2"],
    outputs: Logprobs,
    batch: WeighedPairs,
    sft_coef: float,
) -> tuple[Ratio, Metrics]:
    """The losses of pairs, with the added likelihood of the chosen response, as sum and weight.

    Args:
      losses: of each pair.
      rewards: of its responses, what they were computed from.
      outputs: of the policy that is trained.
      batch: the pairs, or any part of them.
      sft_coef: price of a nat of the chosen response, a token.

    Returns:
      The loss, and ``preference_loss`` (without what is added), ``accuracy`` (share of pairs whose chosen response has
      the higher reward; a tie counts half), ``margin``, ``reward_chosen``, ``reward_rejected``, ``logprobs_chosen`` and
      ``logprobs_rejected`` (nats a token), ``entropy`` (nats a token).
    """
    weight = batch.weight
    margin = rewards[:, 0] - rewards[:, 1]
    logprobs, mask = outputs.logprobs, batch.mask
    metrics: Metrics = {
        "preference_loss": weighted(losses, weight),
        "accuracy": weighted(0.5 + 0.5 * jnp.sign(margin), weight),
        "margin": weighted(margin, weight),
        "reward_chosen": weighted(rewards[:, 0], weight),
        "reward_rejected": weighted(rewards[:, 1], weight),
        "logprobs_chosen": masked_ratio(logprobs[:, 0], mask[:, 0]),
        "logprobs_rejected": masked_ratio(logprobs[:, 1], mask[:, 1]),
        "entropy": masked_ratio(outputs.entropy, mask),
    }
    if sft_coef:
        chosen = masked_sum(logprobs[:, 0], mask[:, 0], axis=-1)
        losses = losses - sft_coef * by_length(chosen, mask[:, 0], average=True)
    return weighted(losses, weight), metrics
