"""Process reward model (Lightman et al. 2023): each step of a solution is judged right or wrong at its last token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from yatt_jax.ops import offline, options
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.documents import aggregate_documents
from yatt_jax.ops.masking import masked_ratio
from yatt_jax.types import Metrics, PyTree, Ratio, StepRows, TokenScores

ROWS = Batch = StepRows
TRAINS = ("reward",)
check, scored_by, trains = offline.check, offline.unscored, offline.trains_reward


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Settings of the process reward model."""

    aggregation: Aggregation = Aggregation()  # of steps (its tokens) and solutions (its sequences)

    def __post_init__(self) -> None:
        options.check(self)


def prepare(rows: StepRows, scores: dict[str, PyTree], hyper: Hyper) -> tuple[Batch, Metrics]:
    """The rows; ``right`` is the mean label of their steps."""
    del scores, hyper
    mask = jnp.where((rows.weight > 0)[:, None], rows.mask, 0.0)
    return dataclasses.replace(rows, mask=mask), {"right": masked_ratio(rows.labels, mask)}


def loss(outputs: TokenScores, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """``-y log sigmoid(s) - (1 - y) log sigmoid(-s)`` at the end of each step, with its label y and score s.

    Returns:
      The loss; ``accuracy`` over all steps, ``accuracy_right`` and ``accuracy_wrong`` over those that are; a step is
      held to be right where its score is above 0, and is right where its label is above a half.
    """
    mask = batch.mask
    labels = jnp.where(mask > 0, batch.labels, 0.0)
    scores = jnp.where(mask > 0, outputs.scores[..., 0], 0.0)
    losses = -labels * jax.nn.log_sigmoid(scores) - (1.0 - labels) * jax.nn.log_sigmoid(-scores)
    right = (labels > 0.5).astype(jnp.float32)
    hit = ((scores > 0) == (right > 0)).astype(jnp.float32)
    metrics: Metrics = {
        "accuracy": masked_ratio(hit, mask),
        "accuracy_right": masked_ratio(hit, mask * right),
        "accuracy_wrong": masked_ratio(hit, mask * (1.0 - right)),
    }
    total = aggregate_documents(losses, mask, batch.inputs.segments, batch.weight, hyper.aggregation)
    return total, metrics


LOSSES = {"reward": loss}
