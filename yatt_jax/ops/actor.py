"""What the online algorithms share: sampled rows on their way to a batch, and the loss of the policy on it."""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from yatt_jax.ops.aggregate import Aggregation, aggregate
from yatt_jax.ops.correction import Correction, importance_weights
from yatt_jax.ops.kl import KlPenalty, kl
from yatt_jax.ops.masking import masked_ratio, masked_sum
from yatt_jax.ops.metrics import rollout_metrics, sampler_logprobs
from yatt_jax.ops.options import Count, NotNegative, check
from yatt_jax.ops.policy import Clip, surrogate
from yatt_jax.ops.rewards import Shaping, shape_scores, trained_rows
from yatt_jax.types import Inputs, Logprobs, Metrics, PyTree, Ratio, Rollout

# What importance ratios start from: "scored" is a forward pass by the weights about to be trained; "sampled" takes the
# sampler's own log-probabilities and saves that pass, which is right where they are exact or the rows are stale;
# "current" saves it as well where the rows are trained in one update: its own forward pass, held constant, is the same.
OldLogprobs: TypeAlias = Literal["scored", "sampled", "current"]


class ActorOptions(Protocol):
    """Settings that the functions here read from an algorithm's ``Hyper``."""

    @property
    def kl(self) -> KlPenalty: ...  # noqa: D102
    @property
    def clip(self) -> Clip: ...  # noqa: D102
    @property
    def aggregation(self) -> Aggregation: ...  # noqa: D102
    @property
    def correction(self) -> Correction: ...  # noqa: D102
    @property
    def entropy_coef(self) -> float: ...  # noqa: D102
    @property
    def old_logprobs(self) -> OldLogprobs: ...  # noqa: D102
    @property
    def epochs(self) -> int: ...  # noqa: D102
    @property
    def minibatches(self) -> int: ...  # noqa: D102


class ActorRows(Protocol):
    """What ``loss`` reads from an algorithm's batch; see ``ActorBatch``."""

    @property
    def response_mask(self) -> Float[Array, "B T"]: ...  # noqa: D102
    @property
    def old_logprobs(self) -> Float[Array, "B T"] | None: ...  # noqa: D102
    @property
    def reference_logprobs(self) -> Float[Array, "B T"] | None: ...  # noqa: D102
    @property
    def correction(self) -> Float[Array, "B T"] | None: ...  # noqa: D102
    @property
    def advantages(self) -> Float[Array, "B T"]: ...  # noqa: D102
    @property
    def kl_coef(self) -> Float[Array, "B"]: ...  # noqa: D102


@dataclasses.dataclass(frozen=True)
class ActorHyper:
    """Settings that algorithms with a clipped policy loss share; each adds its own and gives its own defaults."""

    kl: KlPenalty = KlPenalty()
    clip: Clip = Clip()
    aggregation: Aggregation = Aggregation()
    correction: Correction = Correction()
    old_logprobs: OldLogprobs = "scored"
    entropy_coef: NotNegative = 0.0
    epochs: Count = 1
    minibatches: Count = 1  # in one epoch
    target_kl: NotNegative = 0.0  # kl_update (nats a token) above which the rest of a step is dropped; 0: off

    def __post_init__(self) -> None:
        check(self, *rules(self))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActorBatch:
    """Rows to train a policy on, the batch of every algorithm without a critic; rows of zeros weigh nothing.

    Attributes:
      inputs: tokens of prompt and response.
      response_mask: 1 at the tokens that are trained.
      kept: support of each token, see ``Rollout.kept``.
      old_logprobs: where importance ratios start from; None: from the forward pass of the update itself.
      reference_logprobs: of the frozen reference, where the divergence is charged in the loss.
      correction: weights of the policy's loss, where they are on; see ``ops.correction``.
      advantages: of each token.
      kl_coef: price of a nat, in every row.
    """

    inputs: Inputs
    response_mask: Float[Array, "B T"]
    kept: UInt8[Array, "B T V8"] | None
    old_logprobs: Float[Array, "B T"] | None
    reference_logprobs: Float[Array, "B T"] | None
    correction: Float[Array, "B T"] | None
    advantages: Float[Array, "B T"]
    kl_coef: Float[Array, "B"]


@dataclasses.dataclass(frozen=True)
class Scored:
    """A rollout with what the models and rewards say of it, before advantages.

    Attributes:
      trained: 1 for rows that losses and statistics see.
      mask: 1 at the response tokens of these rows.
      rewards: one a row as training sees it, see ``shape_scores``.
      penalty: ``beta * kl_t`` where the divergence is charged in the reward, else 0.
      old_logprobs: of the policy before the update, as the sampler says unless the rows were scored.
      ratio_from: where importance ratios start from; None: from the forward pass of the update itself.
      reference_logprobs: for the loss, where the divergence is charged there.
      correction: importance weights, where they are on.
      metrics: facts about the rollout.
    """

    trained: Float[Array, "B"]
    mask: Float[Array, "B T"]
    rewards: Float[Array, "B"]
    penalty: Float[Array, "B T"]
    old_logprobs: Float[Array, "B T"]
    ratio_from: Float[Array, "B T"] | None
    reference_logprobs: Float[Array, "B T"] | None
    correction: Float[Array, "B T"] | None
    metrics: Metrics

    @property
    def net_rewards(self) -> Float[Array, "B"]:
        """``rewards`` less the penalty of the whole response: for algorithms that look at responses, not tokens."""
        return self.rewards - masked_sum(self.penalty, self.mask, axis=-1)


def rules(options: ActorOptions) -> tuple[tuple[bool, str], ...]:
    """What must hold of the options together, for ``options.check``."""
    correction = options.correction.how
    fits = options.old_logprobs == "scored" or correction == "off"
    current = options.old_logprobs == "current"
    updates = options.epochs * options.minibatches
    return (
        (fits, f"correction.how = {correction!r} compares trainer and sampler: it needs old_logprobs = 'scored'"),
        (
            not current or updates == 1,
            f"old_logprobs = 'current': {updates} updates a rollout move away from the policy that it starts from; "
            "set epochs and minibatches to 1, or old_logprobs to 'scored'",
        ),
        (
            not current or options.kl.place != "reward",
            "old_logprobs = 'current': kl.place = 'reward' charges the divergence before the update; use 'scored'",
        ),
    )


def scored_by(options: ActorOptions) -> tuple[str, ...]:
    """Roles whose scores ``scored`` needs: the policy unless its sampler is believed, the reference if a KL is on."""
    actor = ("actor",) if options.old_logprobs == "scored" else ()
    return (*actor, "reference") if options.kl.place != "none" else actor


def trains(options: ActorOptions, step: int) -> tuple[str, ...]:
    """Roles that are updated in a step, in order: the policy alone."""
    del options, step
    return ("actor",)


def scored(
    rollout: Rollout,
    rewards: Float[Array, "B"],
    scores: dict[str, PyTree],
    options: ActorOptions,
    shaping: Shaping,
    kl_coef: Float[Array, ""],
) -> Scored:
    """Everything about a rollout but its advantages. A row whose reward is NaN is left out of losses and statistics.

    Args:
      rollout: the rows, over all devices.
      rewards: one a row, NaN where invalid.
      scores: role -> ``Logprobs``, of the roles that ``scored_by`` names.
      options: the algorithm's settings.
      shaping: what happens to rewards.
      kl_coef: price of a nat in this step.
    """
    sampler = sampler_logprobs(rollout)
    old = scores["actor"].logprobs if options.old_logprobs == "scored" else sampler
    ratio_from = None if options.old_logprobs == "current" else old
    trained = trained_rows(rollout, rewards, shaping.mask_truncated)
    mask = rollout.response_mask * trained[:, None]
    lengths = jnp.sum(rollout.response_mask, axis=-1)
    shaped = shape_scores(rewards, trained, rollout.ended, lengths, shaping)
    metrics = rollout_metrics(rollout, rewards, shaped, trained, old, scores.get("actor"), scores.get("reference"))
    penalty, for_loss, weights = jnp.zeros_like(old), None, None
    if options.kl.place == "reward":
        penalty = kl_coef * kl(old, scores["reference"].logprobs, options.kl.estimator)
    elif options.kl.place == "loss":
        for_loss = scores["reference"].logprobs
    if options.correction.how != "off":
        weights, facts = importance_weights(old, sampler, mask, options.correction)
        metrics |= facts
    return Scored(trained, mask, shaped, penalty, old, ratio_from, for_loss, weights, metrics)


def make_batch(
    rollout: Rollout, rows: Scored, advantages: Float[Array, "B T"], kl_coef: Float[Array, ""]
) -> tuple[ActorBatch, Metrics]:
    """The batch of an algorithm that trains the policy alone, and the facts about its rollout."""
    made = ActorBatch(
        inputs=rollout.inputs,
        response_mask=rows.mask,
        kept=rollout.kept,
        old_logprobs=rows.ratio_from,
        reference_logprobs=rows.reference_logprobs,
        correction=rows.correction,
        advantages=advantages,
        kl_coef=jnp.full(rows.trained.shape, kl_coef),
    )
    return made, rows.metrics


def loss(outputs: Logprobs, batch: ActorRows, hyper: ActorOptions) -> tuple[Ratio, Metrics]:
    """``w L(r, A) - c H + beta KL`` of every token, added up as ``hyper.aggregation`` says.

    L is the clipped surrogate or the clipped weight, w the correction of stale or mismatched rows, H the entropy, KL
    the divergence from the reference where it is charged in the loss.

    Args:
      outputs: of the policy that is trained.
      batch: the rows, or any part of them.
      hyper: the algorithm's settings.

    Returns:
      The loss as sum and weight, and ``policy_loss``, ``entropy``, ``ratio_mean``, ``ratio_max``, ``clip_fraction``,
      ``kl_update``.
    """
    mask = batch.response_mask
    old = jax.lax.stop_gradient(outputs.logprobs) if batch.old_logprobs is None else batch.old_logprobs
    losses, metrics = surrogate(outputs.logprobs, old, batch.advantages, mask, hyper.clip)
    if batch.correction is not None:
        losses = batch.correction * losses
    metrics["policy_loss"] = aggregate(losses, mask, hyper.aggregation)
    metrics["entropy"] = masked_ratio(outputs.entropy, mask)
    if hyper.entropy_coef:
        losses = losses - hyper.entropy_coef * outputs.entropy
    if batch.reference_logprobs is not None:
        divergence = kl(outputs.logprobs, batch.reference_logprobs, hyper.kl.estimator)
        losses = losses + batch.kl_coef[:, None] * divergence
    return aggregate(losses, mask, hyper.aggregation), metrics
