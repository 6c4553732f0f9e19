"""Distillation from a frozen teacher on given texts (Hinton et al. 2015), by its K largest logits of each token.

The teacher's opinion of a text does not change, so it can be computed once and kept. On-policy distillation, on what
the student writes itself, is ``distill``.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from yatt_jax.ops import offline
from yatt_jax.ops.chunks import Readout
from yatt_jax.ops.distill import largest_logits
from yatt_jax.ops.distill_loss import TopKHyper, read_topk, topk_loss
from yatt_jax.ops.documents import trained_rows
from yatt_jax.ops.options import Count
from yatt_jax.types import Metrics, TextRows, TopK, TopKRows

ROWS = TextRows
Batch = TopKRows
TRAINS = ("actor",)
check, trains = offline.check, offline.trains_actor


@dataclasses.dataclass(frozen=True)
class Hyper(TopKHyper):
    """Settings of distillation from a teacher."""

    k: Count = 64  # logits of the teacher that are kept; a smaller vocabulary is kept whole


def scored_by(hyper: Hyper) -> tuple[str, ...]:
    """Roles whose scores ``prepare`` needs."""
    del hyper
    return ("teacher",)


def read_teacher(
    hidden: Float[Array, "B T D"], matrix: Float[Array, "V D"], rows: TextRows, hyper: Hyper, readout: Readout
) -> tuple[TopK, Float[Array, "B T"]]:
    """The teacher's largest logits and its log-sum-exp."""
    del rows
    return largest_logits(hidden, matrix, min(hyper.k, matrix.shape[0]), readout)


def prepare(rows: TextRows, scores: dict[str, tuple[TopK, Float[Array, "B T"]]], hyper: Hyper) -> tuple[Batch, Metrics]:
    """The rows with the teacher's opinion, see ``trained_rows``."""
    del hyper
    rows, metrics = trained_rows(rows)
    return TopKRows(rows.inputs, rows.mask, *scores["teacher"], rows.weight), metrics


READS = {"actor": read_topk, "teacher": read_teacher}
LOSSES = {"actor": topk_loss}
