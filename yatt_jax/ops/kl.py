"""Estimates of the divergence between policy and reference, and the coefficient that steers it."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float

from yatt_jax.ops.options import NotNegative, Positive, check

Estimator: TypeAlias = Literal["k1", "k2", "k3"]
LIMIT = 20.0  # log-ratios are clamped to this before exp: e^20 is beyond any use, and float32 overflows at 88


@dataclasses.dataclass(frozen=True)
class KlPenalty:
    """How leaving the reference is charged."""

    place: Literal["reward", "loss", "none"] = "reward"
    estimator: Estimator = "k1"
    coef: NotNegative = 0.05  # price of a nat; the first one, if it adapts
    adaptive_target: NotNegative = 0.0  # nats a response that an adapting coefficient aims at; 0: it stays
    adaptive_horizon: Positive = 10_000.0  # responses

    def __post_init__(self) -> None:
        usable = not self.adaptive_target or self.place != "none"
        check(self, (usable, "adaptive_target needs place = 'reward' or 'loss'"))

    def adapted(self, coefficient: float, observed: float, rows: int) -> float:
        """The coefficient of the next step, where it adapts.

        Args:
          coefficient: the one of this step; the first step's is ``coef``.
          observed: k1 of this step's responses in nats: summed over tokens, averaged over rows.
          rows: how many responses that were.
        """
        if not self.adaptive_target or not math.isfinite(observed):
            return coefficient
        return adapted_coefficient(
            coefficient, observed, target=self.adaptive_target, rows=rows, horizon=self.adaptive_horizon
        )


def kl(logprobs: Float[Array, "*B"], reference: Float[Array, "*B"], estimator: Estimator) -> Float[Array, "*B"]:
    """Estimates KL(policy || reference) at tokens drawn from the policy; with ``d = logprobs - reference``:

    - ``k1``: ``d``, unbiased; as a loss its expected gradient is 0, so it belongs in the reward
    - ``k2``: ``d^2 / 2``, whose gradient is that of the divergence
    - ``k3``: ``exp(-d) - 1 + d``, unbiased and never negative

    Source: Schulman 2020, "Approximating KL divergence". ``d`` is clamped to +-20 inside the exponential.

    Raises:
      ValueError: an unknown estimator.
    """
    d = logprobs - reference
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d * d
    if estimator == "k3":
        return jnp.expm1(jnp.clip(-d, -LIMIT, LIMIT)) + d
    raise ValueError(f"KL estimator {estimator!r}: expected one of k1, k2, k3")


def adapted_coefficient(coefficient: float, observed: float, *, target: float, rows: int, horizon: float) -> float:
    """``beta (1 + clip(KL / target - 1, -.2, .2) rows / horizon)``.

    Source: Ziegler et al. 2019, section 2.2.

    Args:
      coefficient: beta.
      observed: KL of a response, in nats: the sum over its tokens, averaged over rows.
      target: the KL that is wanted.
      rows: responses that were observed.
      horizon: responses over which a full error moves beta by about 20 %.
    """
    error = min(max(observed / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * rows / horizon)
