"""What algorithms that imitate a teacher on given texts share: settings, and sums of a batch's divergences."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float

from yatt_jax.ops import options
from yatt_jax.ops.aggregate import Aggregation
from yatt_jax.ops.chunks import Readout
from yatt_jax.ops.distill import Direction, Rest, logits_at, topk_divergence
from yatt_jax.ops.documents import aggregate_documents
from yatt_jax.ops.masking import masked_ratio
from yatt_jax.ops.options import NotNegative, Positive
from yatt_jax.types import Inputs, LogitsAt, Metrics, Ratio, TopKRows


@dataclasses.dataclass(frozen=True)
class DistillHyper:
    """Settings of distillation; each algorithm adds its own."""

    direction: Direction = "forward"
    temperature: Positive = 1.0  # of both distributions
    sft_coef: NotNegative = 0.0  # of what is added: minus the log-probability of the text, a token
    aggregation: Aggregation = Aggregation()

    def __post_init__(self) -> None:
        options.check(self)


@dataclasses.dataclass(frozen=True)
class TopKHyper(DistillHyper):
    """Settings where K logits of the teacher are known at each token."""

    rest: Rest = "left_out"

    def __post_init__(self) -> None:
        fits = self.rest == "left_out" or self.temperature == 1
        fault = f"temperature = {self.temperature}: the rest of the vocabulary is known at 1 alone; rest = 'left_out'"
        options.check(self, (fits, fault))


class Texts(Protocol):
    """Rows of packed documents."""

    @property
    def inputs(self) -> Inputs: ...  # noqa: D102
    @property
    def mask(self) -> Float[Array, "B T"]: ...  # noqa: D102
    @property
    def weight(self) -> Float[Array, "B"]: ...  # noqa: D102


def loss(
    apart: Float[Array, "B T"], logprobs: Float[Array, "B T"], batch: Texts, hyper: DistillHyper
) -> tuple[Ratio, Metrics]:
    """Divergences of tokens, with the added likelihood of the text, added up as ``hyper.aggregation`` says.

    Args:
      apart: divergence at each token.
      logprobs: of the tokens by the student.
      batch: the rows.
      hyper: the algorithm's settings.

    Returns:
      The loss; ``divergence`` (as the loss has it) and ``nll`` (nats a token).
    """
    mask = batch.mask
    losses = apart - hyper.sft_coef * logprobs if hyper.sft_coef else apart
    total = aggregate_documents(losses, mask, batch.inputs.segments, batch.weight, hyper.aggregation)
    return total, {"divergence": masked_ratio(apart, mask), "nll": masked_ratio(-logprobs, mask)}


def read_topk(
    hidden: Float[Array, "B T D"], matrix: Float[Array, "V D"], rows: TopKRows, hyper: TopKHyper, readout: Readout
) -> LogitsAt:
    """The student's logits of the teacher's entries."""
    del hyper
    return logits_at(hidden, matrix, rows.topk.ids, rows.inputs.tokens, readout)


def topk_loss(outputs: LogitsAt, batch: TopKRows, hyper: TopKHyper) -> tuple[Ratio, Metrics]:
    """Divergence over the teacher's K entries; beside ``loss``'s metrics ``teacher_mass``, the share that they have."""
    apart = topk_divergence(
        outputs,
        batch.topk.logits,
        batch.log_sum_exp,
        direction=hyper.direction,
        rest=hyper.rest,
        temperature=hyper.temperature,
    )
    total, metrics = loss(apart, outputs.logprobs, batch, hyper)
    mass = jnp.sum(jnp.exp(batch.topk.logits - batch.log_sum_exp[..., None]), axis=-1)
    return total, metrics | {"teacher_mass": masked_ratio(mass, batch.mask)}
