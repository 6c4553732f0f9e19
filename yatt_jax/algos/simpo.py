"""Simple preference optimisation (Meng et al. 2024): mean log-probabilities as rewards, a margin, and no reference."""

from __future__ import annotations

import dataclasses

from yatt_jax.ops import offline, pairs, preference
from yatt_jax.ops.options import NotNegative, Positive
from yatt_jax.ops.pairs import PairBatch, PreferenceHyper
from yatt_jax.types import Logprobs, Metrics, PairRows, Ratio

ROWS = PairRows
Batch = PairBatch
TRAINS = ("actor",)
check, scored_by, trains = offline.check, offline.unscored, offline.trains_actor
prepare = pairs.prepare


@dataclasses.dataclass(frozen=True)
class Hyper(PreferenceHyper):
    """Settings of SimPO."""

    beta: Positive = 2.0
    length_average: bool = True
    gamma: NotNegative = 0.5  # reward by which the chosen response should lead


def loss(outputs: Logprobs, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """``-log sigmoid(beta (p_chosen - p_rejected) - gamma)``, with p a response's mean log-probability."""
    logprobs = pairs.log_ratios(outputs, batch, hyper)
    lead = logprobs[:, 0] - logprobs[:, 1] - hyper.gamma / hyper.beta
    return pairs.loss(preference.logistic(lead, hyper.beta), logprobs, outputs, batch, hyper)


LOSSES = {"actor": loss}
