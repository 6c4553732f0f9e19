"""Reward model by regression on attributes (Wang et al. 2023, "HelpSteer"): one output each, some of them unknown."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from yatt_jax.ops import offline, options
from yatt_jax.ops.heads import at_last_token
from yatt_jax.ops.masking import masked_ratio, masked_sum
from yatt_jax.ops.options import Count, NotNegative
from yatt_jax.types import LabelRows, Metrics, PyTree, Ratio, TokenScores

ROWS = Batch = LabelRows
TRAINS = ("reward",)
check, scored_by, trains = offline.check, offline.unscored, offline.trains_reward


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Settings of the regression."""

    attributes: Count = 1  # numbers of a label, and outputs of the model
    attribute_weights: tuple[NotNegative, ...] = ()  # of each attribute in the mean; empty: all 1

    def __post_init__(self) -> None:
        weights = self.attribute_weights
        usable = not weights or (min(weights) >= 0 and max(weights) > 0)
        options.check(
            self,
            (usable, f"attribute_weights = {weights}: must be at least 0, and one above it"),
            (
                len(weights) in (0, self.attributes),
                f"attribute_weights has {len(weights)} numbers for attributes = {self.attributes}: give one each",
            ),
        )


def labels(hyper: Hyper) -> int:
    """Outputs of the reward model."""
    return hyper.attributes


def prepare(rows: LabelRows, scores: dict[str, PyTree], hyper: Hyper) -> tuple[Batch, Metrics]:
    """The rows with ``label_mask`` times all weights; ``known`` is the share of attributes that have a label."""
    del scores
    weigh = jnp.asarray(hyper.attribute_weights or (1.0,) * hyper.attributes, jnp.float32)
    real = jnp.broadcast_to((rows.weight > 0)[:, None], rows.labels.shape).astype(jnp.float32)
    known = masked_ratio((rows.label_mask > 0).astype(jnp.float32), real)
    return dataclasses.replace(rows, label_mask=rows.label_mask * weigh * rows.weight[:, None]), {"known": known}


def loss(outputs: TokenScores, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """``sum m (score - label)^2 / sum m`` over rows and attributes, m being the mask times the weights.

    Returns:
      The loss; ``error_y`` (mean absolute error) for each attribute y, counted from 0.
    """
    del hyper
    mask = batch.label_mask
    apart = jnp.where(mask > 0, at_last_token(outputs.scores, batch.inputs) - batch.labels, 0.0)
    metrics: Metrics = {
        f"error_{y}": Ratio(masked_sum(jnp.abs(apart[:, y]) * mask[:, y], mask[:, y]), jnp.sum(mask[:, y]))
        for y in range(mask.shape[-1])
    }
    return Ratio(jnp.sum(mask * jnp.square(apart)), jnp.sum(mask)), metrics


LOSSES = {"reward": loss}
