"""Policy-gradient and value losses of single tokens."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from yatt_jax.ops.kl import LIMIT
from yatt_jax.ops.masking import masked_ratio, masked_sum
from yatt_jax.ops.options import NotNegative, Share, check
from yatt_jax.types import Max, Metrics

Level: TypeAlias = Literal["token", "sequence_mean", "sequence_product"]


@dataclasses.dataclass(frozen=True)
class Clip:
    """What the probability ratio r of new to old policy is taken of, and how far it pays off."""

    low: Share = 0.2  # down to 1 - low
    high: NotNegative = 0.2  # up to 1 + high
    dual: NotNegative = 0.0  # where the advantage is negative, up to this, above 1; 0: off
    level: Level = "token"  # see ``at_level``
    how: Literal["surrogate", "weight"] = "surrogate"  # see ``clipped_surrogate`` and ``clipped_weight``

    def __post_init__(self) -> None:
        check(
            self,
            (not 0 < self.dual <= 1, f"dual = {self.dual}: must be above 1, or 0 for off"),
            (self.how == "surrogate" or not self.dual, f"dual = {self.dual}: needs how = 'surrogate'"),
        )


def log_ratio(logprobs: Float[Array, "*B"], old: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """``log(pi / pi_old)``, clamped to +-20."""
    return jnp.clip(logprobs - old, -LIMIT, LIMIT)


def at_level(differences: Float[Array, "*B T"], mask: Float[Array, "*B T"], level: Level) -> Float[Array, "*B T"]:
    """Differences of log-probabilities as logs of the ratio r, clamped to +-20:

    - ``token``: each token has its own
    - ``sequence_mean``: all tokens share their mean, so that r is the geometric mean (GSPO, Zheng et al. 2025)
    - ``sequence_product``: all tokens share their sum: r is the ratio of the whole responses' probabilities, as where
      a response is one action (RLOO, Ahmadian et al. 2024)

    Args:
      differences: ``log pi - log pi_old`` of each token.
      mask: 1 at tokens that count.
      level: which of them.
    """
    if level != "token":
        total = masked_sum(differences, mask, axis=-1)
        count = jnp.maximum(jnp.sum(mask, axis=-1), 1.0)
        shared = total / count if level == "sequence_mean" else total
        differences = jnp.broadcast_to(shared[..., None], differences.shape)
    return jnp.clip(differences, -LIMIT, LIMIT)


def clipped_surrogate(log_ratios: Float[Array, "*B"], advantages: Float[Array, "*B"], clip: Clip) -> Float[Array, "*B"]:
    """``max(-r A, -clip(r, 1 - low, 1 + high) A)``; with a dual clip c, where A < 0, ``min(that, -c A)``.

    Sources: Schulman et al. 2017 (PPO); Ye et al. 2020 (dual clip); Yu et al. 2025 (asymmetric clip).

    Args:
      log_ratios: log of r.
      advantages: A, a constant.
      clip: low, high and c.
    """
    ratio = jnp.exp(log_ratios)
    loss = jnp.maximum(-ratio * advantages, -jnp.clip(ratio, 1.0 - clip.low, 1.0 + clip.high) * advantages)
    if clip.dual:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -clip.dual * advantages), loss)
    return loss


def clipped_weight(
    log_ratios: Float[Array, "*B"], advantages: Float[Array, "*B"], logprobs: Float[Array, "*B"], clip: Clip
) -> Float[Array, "*B"]:
    """``-w A logp`` with the constant ``w = clip(r, 1 - low, 1 + high)``: no token's gradient is lost to the clip.

    Source: CISPO, MiniMax 2025, "MiniMax-M1", section 3.1.

    Args:
      log_ratios: log of r.
      advantages: A, a constant.
      logprobs: of the policy.
      clip: low and high.
    """
    weight = jnp.clip(jnp.exp(log_ratios), 1.0 - clip.low, 1.0 + clip.high)
    return -jax.lax.stop_gradient(weight) * advantages * logprobs


def surrogate(
    logprobs: Float[Array, "*B T"],
    old: Float[Array, "*B T"],
    advantages: Float[Array, "*B T"],
    mask: Float[Array, "*B T"],
    clip: Clip,
) -> tuple[Float[Array, "*B T"], Metrics]:
    """The loss of each token and how far the policy has moved; a ratio of whole sequences stands at all their tokens.

    Returns:
      The losses; ``surrogate_metrics``, and ``kl_update``, the k3 estimate of KL(old || new) in nats a token.
    """
    log_ratios = at_level(logprobs - old, mask, clip.level)
    if clip.how == "weight":
        loss = clipped_weight(log_ratios, advantages, logprobs, clip)
    else:
        loss = clipped_surrogate(log_ratios, advantages, clip)
    of_tokens = log_ratio(logprobs, old)
    update = masked_ratio(jnp.expm1(of_tokens) - of_tokens, mask)
    return loss, surrogate_metrics(log_ratios, advantages, mask, clip) | {"kl_update": update}


def surrogate_metrics(
    log_ratios: Float[Array, "*B"], advantages: Float[Array, "*B"], mask: Float[Array, "*B"], clip: Clip
) -> Metrics:
    """How far an update has moved from the policy that sampled, over the tokens that count.

    Returns:
      ``ratio_mean`` and ``ratio_max`` of r; ``clip_fraction``, the share of tokens whose gradient the clips remove, or
      whose weight they change.
    """
    ratio = jnp.exp(log_ratios)
    above, below = ratio > 1.0 + clip.high, ratio < 1.0 - clip.low
    clipped = above | below if clip.how == "weight" else ((advantages > 0) & above) | ((advantages < 0) & below)
    if clip.dual:
        clipped |= (advantages < 0) & (ratio > clip.dual)
    return {
        "ratio_mean": masked_ratio(ratio, mask),
        "ratio_max": Max(jnp.max(jnp.where(mask > 0, ratio, -jnp.inf))),
        "clip_fraction": masked_ratio(clipped.astype(jnp.float32), mask),
    }


def value_loss(
    values: Float[Array, "*B"], old_values: Float[Array, "*B"], returns: Float[Array, "*B"], clip: float = 0.0
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """``0.5 max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2)``; without a clip, ``0.5 (v - R)^2``.

    Args:
      values: v.
      old_values: v_old, when the rollout was scored.
      returns: R.
      clip: eps, in units of the value; 0 is off.

    Returns:
      The losses, and 1 where the clipped term is the larger one.
    """
    plain = jnp.square(values - returns)
    if not clip:
        return 0.5 * plain, jnp.zeros_like(plain)
    near = jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - returns)
    return 0.5 * jnp.maximum(plain, near), (near > plain).astype(plain.dtype)
