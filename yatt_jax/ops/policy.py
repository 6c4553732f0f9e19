"""Policy-gradient and value losses of single tokens."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from yatt_jax.ops.kl import LIMIT
from yatt_jax.ops.masking import masked_ratio
from yatt_jax.ops.options import NotNegative, Share, check
from yatt_jax.types import Max, Metrics


@dataclasses.dataclass(frozen=True)
class Clip:
    """How far the probability ratio r of new to old policy pays off."""

    low: Share = 0.2  # down to 1 - low
    high: NotNegative = 0.2  # up to 1 + high
    dual: NotNegative = 0.0  # where the advantage is negative, up to this, above 1; 0: off

    def __post_init__(self) -> None:
        check(self, (not 0 < self.dual <= 1, f"dual = {self.dual}: must be above 1, or 0 for off"))


def log_ratio(logprobs: Float[Array, "*B"], old: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """``log(pi / pi_old)``, clamped to +-20."""
    return jnp.clip(logprobs - old, -LIMIT, LIMIT)


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


def surrogate(
    logprobs: Float[Array, "*B"],
    old: Float[Array, "*B"],
    advantages: Float[Array, "*B"],
    mask: Float[Array, "*B"],
    clip: Clip,
) -> tuple[Float[Array, "*B"], Metrics]:
    """``clipped_surrogate`` of each token, and ``surrogate_metrics``."""
    log_ratios = log_ratio(logprobs, old)
    return clipped_surrogate(log_ratios, advantages, clip), surrogate_metrics(log_ratios, advantages, mask, clip)


def surrogate_metrics(
    log_ratios: Float[Array, "*B"], advantages: Float[Array, "*B"], mask: Float[Array, "*B"], clip: Clip
) -> Metrics:
    """How far an update has moved from the policy that sampled, over the tokens that count.

    Returns:
      ``ratio_mean`` and ``ratio_max`` of r; ``clip_fraction``, the share of tokens whose gradient the clips remove;
      ``kl_update``, the k3 estimate of KL(old || new) in nats a token.
    """
    ratio = jnp.exp(log_ratios)
    clipped = ((advantages > 0) & (ratio > 1.0 + clip.high)) | ((advantages < 0) & (ratio < 1.0 - clip.low))
    if clip.dual:
        clipped |= (advantages < 0) & (ratio > clip.dual)
    return {
        "ratio_mean": masked_ratio(ratio, mask),
        "ratio_max": Max(jnp.max(jnp.where(mask > 0, ratio, -jnp.inf))),
        "clip_fraction": masked_ratio(clipped.astype(jnp.float32), mask),
        "kl_update": masked_ratio(jnp.expm1(log_ratios) - log_ratios, mask),
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
