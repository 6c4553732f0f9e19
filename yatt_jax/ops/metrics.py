"""What a rollout looked like, for every online algorithm."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from yatt_jax.ops.kl import kl
from yatt_jax.ops.masking import masked_ratio, masked_sum
from yatt_jax.types import Logprobs, Metrics, Ratio, Rollout, Values


def rollout_metrics(
    rollout: Rollout,
    rewards: Float[Array, "B"],
    shaped: Float[Array, "B"],
    trained: Float[Array, "B"],
    old: Float[Array, "B T"],
    actor: Logprobs | None,
    reference: Logprobs | None,
) -> Metrics:
    """Facts about sampled rows; rows of padding (no token at all) do not count.

    Args:
      rollout: the rows.
      rewards: one a row, NaN where the reward is invalid.
      shaped: the scores that training uses.
      trained: 1 for rows that are trained.
      old: log-probabilities that importance ratios start from.
      actor: scores by the policy that is about to be trained, unless ``old`` is taken from the sampler.
      reference: scores by the frozen reference, if there is one.

    Returns:
      ``reward`` (mean over valid rows), ``reward_invalid`` (share of rows), ``score`` (mean of shaped scores over
      trained rows), ``trained`` (share of rows), ``response_length`` (tokens), ``ended`` (share of rows). Where the
      actor is given: ``entropy_sampled`` (nats a token), ``probability_difference`` (mean of |p_sampler - p_trainer|
      over tokens). With a reference: ``kl_k1`` and ``kl_k3`` (nats a token), ``kl_response`` (k1, nats a response).
    """
    mask = rollout.response_mask
    rows = jnp.any(rollout.inputs.segments > 0, axis=-1).astype(jnp.float32)
    valid = rows * jnp.isfinite(rewards)
    metrics: Metrics = {
        "reward": masked_ratio(rewards, valid),
        "reward_invalid": Ratio(jnp.sum(rows - valid), jnp.sum(rows)),
        "score": masked_ratio(shaped, trained),
        "trained": Ratio(jnp.sum(trained), jnp.sum(rows)),
        "response_length": Ratio(jnp.sum(mask), jnp.sum(rows)),
        "ended": masked_ratio(rollout.ended.astype(jnp.float32), rows),
    }
    if actor is not None:
        difference = jnp.abs(jnp.exp(sampler_logprobs(rollout)) - jnp.exp(actor.logprobs))
        metrics["entropy_sampled"] = masked_ratio(actor.entropy, mask)
        metrics["probability_difference"] = masked_ratio(difference, mask)
    if reference is not None:
        k1 = kl(old, reference.logprobs, "k1")
        metrics["kl_k1"] = masked_ratio(k1, mask)
        metrics["kl_k3"] = masked_ratio(kl(old, reference.logprobs, "k3"), mask)
        metrics["kl_response"] = Ratio(masked_sum(k1, mask), jnp.sum(rows))
    return metrics


def sampler_logprobs(rollout: Rollout) -> Float[Array, "B T"]:
    """What the sampler says of its tokens where the trainer scores them: on the recorded support, if there is one."""
    return rollout.plain_logprobs if rollout.kept is None else rollout.sampled_logprobs


def critic_metrics(
    critic: Values, advantages: Float[Array, "B T"], returns: Float[Array, "B T"], mask: Float[Array, "B T"]
) -> Metrics:
    """Means of ``value``, ``return`` and ``advantage`` (before whitening) a token, and ``explained_variance``."""
    return {
        "value": masked_ratio(critic.values, mask),
        "return": masked_ratio(returns, mask),
        "advantage": masked_ratio(advantages, mask),
        "explained_variance": explained_variance(critic.values, returns, mask),
    }


def explained_variance(values: Float[Array, "*B"], returns: Float[Array, "*B"], mask: Float[Array, "*B"]) -> Ratio:
    """``1 - Var(R - V) / Var(R)`` over the tokens that count: 1 for a perfect critic, 0 for a constant one.

    The ratio of the two sums of squares is the metric's total and weight.
    """

    def spread(x):
        mean = masked_sum(x, mask) / jnp.maximum(jnp.sum(mask), 1.0)
        return masked_sum(jnp.square(x - mean), mask)

    all_of_it = spread(returns)
    return Ratio(all_of_it - spread(returns - values), all_of_it)
