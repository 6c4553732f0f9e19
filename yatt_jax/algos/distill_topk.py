"""Distillation from a teacher's stored logits (Hinton et al. 2015), the K largest of each token."""

from __future__ import annotations

import dataclasses

from yatt_jax.ops import offline
from yatt_jax.ops.distill_loss import TopKHyper, read_topk, topk_loss
from yatt_jax.ops.documents import trained_rows
from yatt_jax.types import Metrics, PyTree, TopKRows

ROWS = Batch = TopKRows
TRAINS = ("actor",)
READS = {"actor": read_topk}
LOSSES = {"actor": topk_loss}
check, scored_by, trains = offline.check, offline.unscored, offline.trains_actor


@dataclasses.dataclass(frozen=True)
class Hyper(TopKHyper):
    """Settings of distillation from stored logits."""


def prepare(rows: TopKRows, scores: dict[str, PyTree], hyper: Hyper) -> tuple[Batch, Metrics]:
    """The rows without tokens that nothing predicts, see ``trained_rows``."""
    del scores, hyper
    return trained_rows(rows)
