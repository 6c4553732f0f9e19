"""Rows of self-play as pairs: what the data answers, and what was sampled for the same prompt."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from yatt_jax.ops.masking import masked_ratio, masked_sum
from yatt_jax.ops.pairs import weighted
from yatt_jax.types import Inputs, Logprobs, Metrics, Ratio, Rollout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelfPlayBatch:
    """Pairs in rows of two documents; rows of zeros weigh nothing.

    Attributes:
      inputs: prompt and sampled response as segment 1, prompt and the data's answer as segment 2.
      mask: 1 at the tokens of the answer (index 0 of the second axis) and of the sampled response (index 1).
      reference: log-probability of each of the two by the reference.
      beta: reward of a nat, in every row.
      weight: of the pair.
    """

    inputs: Inputs
    mask: Float[Array, "B 2 T"]
    reference: Float[Array, "B 2"]
    beta: Float[Array, "B"]
    weight: Float[Array, "B"]
    kept: None = None  # both are scored under the whole vocabulary

    @property
    def response_mask(self) -> Float[Array, "B T"]:
        """1 at the tokens of either response."""
        return jnp.sum(self.mask, axis=1)

    def of_each(self, scores: Logprobs) -> Logprobs:
        """Scores of the rows as those of pairs, ``[B, 2, T]``."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], self.mask.shape), scores)


def make_batch(
    rollout: Rollout, rewards: Float[Array, "B"], reference: Logprobs, beta: Float[Array, "B"]
) -> tuple[SelfPlayBatch, Metrics]:
    """The pairs of rows of two documents; a row whose reward is NaN has no weight.

    Returns:
      The batch; ``reward``, ``reward_invalid``, ``ended`` and ``response_length`` (tokens) of what was sampled;
      ``answer_length`` of the data; ``beta``.
    """
    segments = rollout.inputs.segments
    rows = jnp.any(segments > 0, axis=-1).astype(jnp.float32)
    weight = rows * jnp.isfinite(rewards)
    sides = jnp.stack([segments == 2, segments == 1], axis=1) & (weight[:, None, None] > 0)
    mask = jnp.where(sides, rollout.response_mask[:, None], 0.0)
    lengths = jnp.sum(mask, axis=-1)
    metrics: Metrics = {
        "reward": masked_ratio(rewards, weight),
        "reward_invalid": Ratio(jnp.sum(rows - weight), jnp.sum(rows)),
        "ended": masked_ratio(rollout.ended.astype(jnp.float32), rows),
        "response_length": weighted(lengths[:, 1], weight),
        "answer_length": weighted(lengths[:, 0], weight),
        "beta": weighted(beta, weight),
    }
    total = masked_sum(reference.logprobs[:, None], mask, axis=-1)
    return SelfPlayBatch(rollout.inputs, mask, total, beta, weight), metrics
