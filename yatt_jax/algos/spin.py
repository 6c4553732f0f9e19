"""Self-play fine-tuning (Chen et al. 2024): DPO in which the rejected responses are the policy's own.

In each iteration the policy of its start is the reference, and writes the responses that are rejected in favour of the
data's. ``beta`` may change from iteration to iteration.
"""

from __future__ import annotations

import dataclasses
import math

from yatt_jax.ops import offline, options, pairs, preference
from yatt_jax.ops.options import Positive
from yatt_jax.ops.pairs import PairBatch, PreferenceHyper
from yatt_jax.types import Logprobs, Metrics, PairRows, Ratio

ROWS = PairRows
Batch = PairBatch
TRAINS = ("actor",)
check, scored_by, trains = offline.check, offline.by_reference, offline.trains_actor
prepare, summary = pairs.prepare, pairs.summary


@dataclasses.dataclass(frozen=True)
class Hyper(PreferenceHyper):
    """Settings of SPIN."""

    betas: tuple[Positive, ...] = ()  # of the first iterations, the last one for all after it; empty: beta for all

    def __post_init__(self) -> None:
        wrong = [beta for beta in self.betas if not 0 < beta < math.inf]
        options.check(self, (not wrong, f"betas = {self.betas}: must all be above 0"))


def at_iteration(hyper: Hyper, iteration: int) -> Hyper:
    """The settings of an iteration, counted from 0."""
    if not hyper.betas:
        return hyper
    return dataclasses.replace(hyper, beta=hyper.betas[min(iteration, len(hyper.betas) - 1)])


def loss(outputs: Logprobs, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """``-log sigmoid(beta delta)`` of every pair, with what ``ops.pairs.loss`` adds and reports."""
    ratios = pairs.log_ratios(outputs, batch, hyper)
    losses = preference.logistic(ratios[:, 0] - ratios[:, 1], hyper.beta)
    return pairs.loss(losses, ratios, outputs, batch, hyper)


LOSSES = {"actor": loss}
