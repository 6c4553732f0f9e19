"""Direct preference optimisation (Rafailov et al. 2023) and losses that differ in what they do with its difference.

Each response's reward is ``beta`` times its log-probability above that of a frozen reference. The difference of the two
is made large (``dpo``; with ``label_smoothing`` cDPO), brought to a fixed margin (``ipo``), or fitted to the true
difference of rewards (the three of RPO).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from yatt_jax.ops import offline, options, pairs, preference
from yatt_jax.ops.options import Positive, Share
from yatt_jax.ops.pairs import PairBatch, PreferenceHyper
from yatt_jax.types import Logprobs, Metrics, PairRows, Ratio

ROWS = PairRows
Batch = PairBatch
TRAINS = ("actor",)
check, scored_by, trains = offline.check, offline.by_reference, offline.trains_actor
prepare, summary = pairs.prepare, pairs.summary


@dataclasses.dataclass(frozen=True)
class Hyper(PreferenceHyper):
    """Settings of DPO. RPO's losses read ``gap`` of the pairs."""

    loss: Literal["dpo", "ipo", "rpo_squared", "rpo_backward_kl", "rpo_forward_kl"] = "dpo"
    label_smoothing: Share = 0.0  # share of pairs taken to be the wrong way round
    gap_scale: Positive = 1.0  # of the true difference of rewards

    def __post_init__(self) -> None:
        smooth = not self.label_smoothing or self.loss == "dpo"
        fault = f"label_smoothing = {self.label_smoothing}: needs loss = 'dpo'"
        unread = f"gap_scale = {self.gap_scale}: loss = {self.loss!r} does not read it; set it to 1"
        options.check(self, (smooth, fault), (self.gap_scale == 1 or needs_gap(self), unread))


def needs_gap(hyper: Hyper) -> bool:
    """Whether the data must say by how much a chosen response is better."""
    return hyper.loss.startswith("rpo")


def loss(outputs: Logprobs, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """The chosen loss of every pair, with what ``ops.pairs.loss`` adds and reports."""
    ratios = pairs.log_ratios(outputs, batch, hyper)
    delta = ratios[:, 0] - ratios[:, 1]
    reward, target = hyper.beta * delta, hyper.gap_scale * batch.gap
    match hyper.loss:
        case "dpo":
            losses = preference.logistic(delta, hyper.beta, hyper.label_smoothing)
        case "ipo":
            losses = preference.squared_to_margin(delta, hyper.beta)
        case "rpo_squared":
            losses = preference.squared_to_gap(delta, batch.gap, hyper.beta, hyper.gap_scale)
        case "rpo_backward_kl":
            losses = preference.bernoulli_kl(target, reward)
        case "rpo_forward_kl":
            losses = preference.bernoulli_kl(reward, target)
    return pairs.loss(losses, ratios, outputs, batch, hyper)


LOSSES = {"actor": loss}
