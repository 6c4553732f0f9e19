"""Supervised fine-tuning: the tokens that count are made likely, by documents that may be packed into rows."""

from __future__ import annotations

import dataclasses

from yatt_jax.ops import offline, options
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.documents import aggregate_documents, trained_rows
from yatt_jax.ops.masking import masked_ratio
from yatt_jax.types import Logprobs, Metrics, PyTree, Ratio, TextRows

ROWS = Batch = TextRows
TRAINS = ("actor",)
check, scored_by, trains = offline.check, offline.unscored, offline.trains_actor


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Settings of supervised fine-tuning."""

    aggregation: Aggregation = Aggregation()

    def __post_init__(self) -> None:
        options.check(self)


def prepare(rows: TextRows, scores: dict[str, PyTree], hyper: Hyper) -> tuple[Batch, Metrics]:
    """The rows without tokens that nothing predicts, see ``trained_rows``."""
    del scores, hyper
    return trained_rows(rows)


def loss(outputs: Logprobs, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """``-log pi`` of each token, added up as ``hyper.aggregation`` says.

    Returns:
      The loss; ``nll`` (nats a token: its exponential is the perplexity) and ``entropy`` (nats a token).
    """
    segments = batch.inputs.segments
    total = aggregate_documents(-outputs.logprobs, batch.mask, segments, batch.weight, hyper.aggregation)
    return total, {
        "nll": masked_ratio(-outputs.logprobs, batch.mask),
        "entropy": masked_ratio(outputs.entropy, batch.mask),
    }


LOSSES = {"actor": loss}
