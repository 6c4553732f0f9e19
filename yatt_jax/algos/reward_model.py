"""Reward model by comparisons (Bradley and Terry 1952): a chosen response is given more than a rejected one.

The chance that the chosen one wins is the sigmoid of the difference of rewards; how much better it truly is can be
asked for as a margin (Touvron et al. 2023, "Llama 2") or weigh the pair (Wang et al. 2024, "HelpSteer2-Preference").
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from yatt_jax.ops import offline, options, preference
from yatt_jax.ops.heads import at_last_token
from yatt_jax.ops.options import NotNegative
from yatt_jax.ops.pairs import weighted
from yatt_jax.types import Metrics, PairRows, PyTree, Ratio, TokenScores

ROWS = Batch = PairRows
TRAINS = ("reward",)
check, scored_by, trains = offline.check, offline.unscored, offline.trains_reward


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Settings of the reward model; all but ``plain`` read ``gap`` of the pairs."""

    loss: Literal["plain", "margin", "scaled"] = "plain"
    center_coef: NotNegative = 0.0  # of the square of a pair's summed rewards: keeps rewards around 0

    def __post_init__(self) -> None:
        options.check(self)


def needs_gap(hyper: Hyper) -> bool:
    """Whether the data must say by how much a chosen response is better."""
    return hyper.loss != "plain"


def prepare(rows: PairRows, scores: dict[str, PyTree], hyper: Hyper) -> tuple[Batch, Metrics]:
    """The rows as they are."""
    del scores, hyper
    return rows, {}


def loss(outputs: TokenScores, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """``-log sigmoid(r_chosen - r_rejected)``, less the gap inside (``margin``) or times the gap (``scaled``).

    Returns:
      The loss, and ``preference_loss`` (without centering), ``accuracy`` (a tie counts half), ``margin``,
      ``reward_chosen``, ``reward_rejected``.
    """
    rewards = at_last_token(outputs.scores, batch.inputs)[..., 0]
    chosen, rejected, weight = rewards[:, 0], rewards[:, 1], batch.weight
    losses = preference.logistic(chosen - rejected - (batch.gap if hyper.loss == "margin" else 0.0), 1.0)
    if hyper.loss == "scaled":
        losses = batch.gap * losses
    metrics: Metrics = {
        "preference_loss": weighted(losses, weight),
        "accuracy": weighted(0.5 + 0.5 * jnp.sign(chosen - rejected), weight),
        "margin": weighted(chosen - rejected, weight),
        "reward_chosen": weighted(chosen, weight),
        "reward_rejected": weighted(rejected, weight),
    }
    if hyper.center_coef:
        losses = losses + hyper.center_coef * jnp.square(chosen + rejected)
    return weighted(losses, weight), metrics


LOSSES = {"reward": loss}
