"""Self-play fine-tuning (SPIN, Chen et al. 2024): DPO in which the rejected responses are the policy's own.

An iteration begins by making the policy its own reference. That one writes the responses which are rejected in favour
of the data's, until the next iteration; where it writes what the data holds, there is nothing more to learn. Rewards
train nothing here: they are reported, and mark invalid rows.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from yatt_jax.ops import actor, options, pairs, preference
from yatt_jax.ops.kl import KlPenalty
from yatt_jax.ops.masking import masked_sum
from yatt_jax.ops.options import Count, NotNegative, Positive
from yatt_jax.ops.self_play import SelfPlayBatch, make_batch
from yatt_jax.types import Logprobs, Metrics, Ratio, Rollout

TRAINS = ("actor",)
SAMPLED_BY = "reference"
ANSWERS = True  # rows hold the data's own answers as well
Batch = SelfPlayBatch
trains = actor.trains


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Settings of SPIN."""

    betas: tuple[Positive, ...] = (0.1,)  # reward of a nat in each iteration, the last one in all after it
    iteration_steps: Count = 50
    length_average: bool = False  # responses are compared by their log-probability a token, not by the whole
    sft_coef: NotNegative = 0.0  # of what is added: minus the log-probability of the data's answer, a token
    epochs: Count = 1
    minibatches: Count = 1  # in one epoch

    def __post_init__(self) -> None:
        good = bool(self.betas) and all(0 < beta < math.inf for beta in self.betas)
        options.check(self, (good, f"betas = {self.betas}: name at least one, all of them above 0"))

    # The loss itself holds the policy to the reference.

    @property
    def kl(self) -> KlPenalty:  # noqa: D102
        return KlPenalty(place="none")

    @property
    def target_kl(self) -> float:  # noqa: D102
        return 0.0


def check(hyper: Hyper, samples_per_prompt: int) -> list[str]:
    """Any number of responses to a prompt will do: each is paired with the data's answer."""
    del hyper, samples_per_prompt
    return []


def scored_by(hyper: Hyper) -> tuple[str, ...]:
    """Roles whose scores ``prepare`` needs."""
    del hyper
    return ("reference",)


def iteration_start(hyper: Hyper, step: int) -> int:
    """The first step of the iteration that a step belongs to; before it the policy becomes the reference."""
    return step - step % hyper.iteration_steps


def prepare(
    rollout: Rollout,
    rewards: Float[Array, "B"],
    scores: dict[str, Logprobs],
    hyper: Hyper,
    kl_coef: Float[Array, ""],
) -> tuple[Batch, Metrics]:
    """Pairs with the scores of the reference and the beta of its iteration; see ``self_play.make_batch``."""
    del kl_coef
    iteration = jnp.minimum(rollout.version // hyper.iteration_steps, len(hyper.betas) - 1)
    beta = jnp.asarray(hyper.betas, jnp.float32)[iteration]
    return make_batch(rollout, rewards, scores["reference"], beta)


def loss(outputs: Logprobs, batch: Batch, hyper: Hyper) -> tuple[Ratio, Metrics]:
    """``-log sigmoid(beta (l_answer - l_sampled))`` of every pair, with what ``pairs.total`` adds and reports.

    l is a response's log-ratio to the reference, or its mean over tokens.
    """
    both = batch.of_each(outputs)
    ratios = masked_sum(both.logprobs, batch.mask, axis=-1) - batch.reference
    rewards = batch.beta[:, None] * pairs.by_length(ratios, batch.mask, hyper.length_average)
    losses = preference.logistic(rewards[:, 0] - rewards[:, 1], 1.0)
    return pairs.total(losses, rewards, both, batch, hyper.sft_coef)


LOSSES = {"actor": loss}
