"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024): responses that are wanted or not, without pairs.

How much a response gains is measured against how far the policy has gone from the reference altogether: the mean of
``log pi - log pi_reference`` over prompts with responses to others, clamped at 0 and constant. It is taken over the
whole batch from the policy at the start of the step, which is the policy that is updated; so it costs no gradient and
is the same for every split into micro-batches.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from yatt_jax.ops import offline, pairs, preference
from yatt_jax.ops.documents import trained_tokens
from yatt_jax.ops.masking import masked_ratio, masked_sum
from yatt_jax.ops.options import NotNegative
from yatt_jax.ops.pairs import PreferenceHyper, weighted
from yatt_jax.types import Inputs, Logprobs, Metrics, Ratio, UnpairedRows

ROWS = UnpairedRows
TRAINS = ("actor",)
check, summary, trains = offline.check, pairs.summary, offline.trains_actor


@dataclasses.dataclass(frozen=True)
class Hyper(PreferenceHyper):
    """Settings of KTO; what ``sft_coef`` adds is for wanted responses alone."""

    desirable_weight: NotNegative = 1.0
    undesirable_weight: NotNegative = 1.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Responses to train on; rows of zeros weigh nothing.

    Attributes:
      inputs: prompt and response.
      mask: 1 at the tokens that are trained.
      desirable: whether the response is wanted.
      reference: log-probability of the whole response by the frozen reference.
      divergence: how far the policy has gone from the reference, in every row.
      weight: of the row.
    """

    inputs: Inputs
    mask: Float[Array, "B T"]
    desirable: Bool[Array, "B"]
    reference: Float[Array, "B"]
    divergence: Float[Array, "B"]
    weight: Float[Array, "B"]


def scored_by(hyper: Hyper) -> tuple[str, ...]:
    """Roles whose scores ``prepare`` needs; those of the actor as it is before the update."""
    del hyper
    return ("actor", "reference")


def prepare(rows: UnpairedRows, scores: dict[str, Float[Array, "B 2"]], hyper: Hyper) -> tuple[Batch, Metrics]:
    """Each row's own response, and the divergence from the other ones.

    Args:
      rows: the rows.
      scores: role -> ``summary`` of its scores.
      hyper: the algorithm's settings.

    Returns:
      The batch; ``kl`` (nats, as it is used) and ``desirable`` (share of rows).
    """
    mask = trained_tokens(rows.inputs, rows.mask, rows.weight)
    apart = pairs.by_length(scores["actor"] - scores["reference"], mask, hyper.length_average)
    divergence = jnp.maximum(weighted(apart[:, 1], rows.weight).mean(), 0.0)
    everywhere = jnp.full(rows.weight.shape, divergence)
    inputs = jax.tree.map(lambda x: x[:, 0], rows.inputs)
    batch = Batch(inputs, mask[:, 0], rows.desirable, scores["reference"][:, 0], everywhere, rows.weight)
    desirable = weighted(rows.desirable.astype(jnp.float32), rows.weight)
    return batch, {"kl": weighted(everywhere, rows.weight), "desirable": desirable}


def loss(outputs: Logprobs, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """``ops.preference.prospect`` of every row, by the weight of its kind.

    Returns:
      The loss, and ``preference_loss`` (without the added likelihood), ``accuracy`` (share of rows on the right side of
      the divergence), ``reward_chosen``, ``reward_rejected``, ``entropy`` (nats a token).
    """
    logprobs = masked_sum(outputs.logprobs, batch.mask, axis=-1)
    ratio = pairs.by_length(logprobs - batch.reference, batch.mask, hyper.length_average)
    kind = jnp.where(batch.desirable, hyper.desirable_weight, hyper.undesirable_weight)
    losses = kind * preference.prospect(ratio, batch.desirable, batch.divergence, hyper.beta)
    wanted, weight = batch.desirable.astype(jnp.float32), batch.weight
    side = jnp.sign(ratio - batch.divergence) * jnp.where(batch.desirable, 1.0, -1.0)
    metrics: Metrics = {
        "preference_loss": weighted(losses, weight),
        "accuracy": weighted(0.5 + 0.5 * side, weight),
        "reward_chosen": weighted(hyper.beta * ratio, weight * wanted),
        "reward_rejected": weighted(hyper.beta * ratio, weight * (1.0 - wanted)),
        "entropy": masked_ratio(outputs.entropy, batch.mask),
    }
    if hyper.sft_coef:
        losses = losses - hyper.sft_coef * wanted * pairs.by_length(logprobs, batch.mask, average=True)
    return weighted(losses, weight), metrics


LOSSES = {"actor": loss}
