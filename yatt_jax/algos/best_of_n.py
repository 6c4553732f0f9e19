"""Best-of-n rejection sampling (RAFT, Dong et al. 2023): the best responses to each prompt are imitated.

Of each group the ``keep`` responses with the highest scores are trained on by plain likelihood, the others not at all.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from yatt_jax.ops import actor, options
from yatt_jax.ops.actor import OldLogprobs
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.correction import Correction
from yatt_jax.ops.groups import best_of, group_faults
from yatt_jax.ops.kl import KlPenalty
from yatt_jax.ops.masking import masked_ratio
from yatt_jax.ops.options import Count, NotNegative
from yatt_jax.ops.policy import Clip
from yatt_jax.ops.rewards import Shaping
from yatt_jax.types import Logprobs, Metrics, PyTree, Ratio, Rollout

TRAINS = ("actor",)
Batch = actor.ActorBatch
scored_by, trains = actor.scored_by, actor.trains


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Settings of best-of-n."""

    kl: KlPenalty = KlPenalty(place="none")
    reward: Shaping = Shaping()
    keep: Count = 1  # responses of each group
    aggregation: Aggregation = Aggregation()
    entropy_coef: NotNegative = 0.0
    epochs: Count = 1
    minibatches: Count = 1  # in one epoch
    target_kl: NotNegative = 0.0  # kl_update (nats a token) above which the rest of a step is dropped; 0: off

    def __post_init__(self) -> None:
        options.check(self)

    # Likelihood is the weighted policy gradient with all weights 1; no ratio is formed, so nothing need be scored.

    @property
    def clip(self) -> Clip:  # noqa: D102
        return Clip(low=0.0, high=0.0, how="weight")

    @property
    def correction(self) -> Correction:  # noqa: D102
        return Correction()

    @property
    def old_logprobs(self) -> OldLogprobs:  # noqa: D102
        return "sampled"


def check(hyper: Hyper, samples_per_prompt: int) -> list[str]:
    """Why a run with so many responses to a prompt would choose nothing; empty if it can."""
    if hyper.keep < samples_per_prompt:
        return []
    if samples_per_prompt == 1:
        return group_faults(1, f"config.hyper.keep = {hyper.keep}")
    return [
        f"config.hyper.keep = {hyper.keep} keeps all of config.rollout.samples_per_prompt = {samples_per_prompt} "
        f"responses to a prompt; set it to at most {samples_per_prompt - 1}"
    ]


def prepare(
    rollout: Rollout, rewards: Float[Array, "B"], scores: dict[str, PyTree], hyper: Hyper, kl_coef: Float[Array, ""]
) -> tuple[Batch, Metrics]:
    """The best rows of each group, with advantage 1.

    Returns:
      The batch; facts about the rollout, with ``score_kept`` (mean score of the rows that are trained).
    """
    rows = actor.scored(rollout, rewards, scores, hyper, hyper.reward, kl_coef)
    best = best_of(rows.net_rewards, rollout.group, rows.trained, hyper.keep)
    rows = dataclasses.replace(rows, mask=rows.mask * best[:, None])
    batch, metrics = actor.make_batch(rollout, rows, rows.mask, kl_coef)
    metrics["score_kept"] = masked_ratio(rows.rewards, best)
    return batch, metrics


def actor_loss(outputs: Logprobs, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """``-log pi`` of the tokens of the best responses, less the entropy bonus, plus the divergence if it is on."""
    total, metrics = actor.loss(outputs, batch, hyper)
    return total, {name: metric for name, metric in metrics.items() if name != "clip_fraction"}


LOSSES = {"actor": actor_loss}
