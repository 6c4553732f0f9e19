"""Odds ratio preference optimisation (Hong et al. 2024): likelihood of the chosen response, and odds above the other's.

``beta`` is the weight of the odds term (the paper's lambda), ``sft_coef`` that of the likelihood. The likelihood is
that of the response; some implementations count the prompt as well.
"""

from __future__ import annotations

import dataclasses

from yatt_jax.ops import offline, pairs, preference
from yatt_jax.ops.options import NotNegative
from yatt_jax.ops.pairs import PairBatch, PreferenceHyper
from yatt_jax.types import Logprobs, Metrics, PairRows, Ratio

ROWS = PairRows
Batch = PairBatch
TRAINS = ("actor",)
check, scored_by, trains = offline.check, offline.unscored, offline.trains_actor
prepare = pairs.prepare


@dataclasses.dataclass(frozen=True)
class Hyper(PreferenceHyper):
    """Settings of ORPO."""

    length_average: bool = True
    sft_coef: NotNegative = 1.0


def loss(outputs: Logprobs, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """``-beta log sigmoid(odds_chosen - odds_rejected)`` in logs of odds, less the log-likelihood of the chosen."""
    logprobs = pairs.log_ratios(outputs, batch, hyper)
    odds = preference.log_odds(logprobs)
    losses = hyper.beta * preference.logistic(odds[:, 0] - odds[:, 1], 1.0)
    return pairs.loss(losses, logprobs, outputs, batch, hyper)


LOSSES = {"actor": loss}
