"""Losses of preferences: between two responses to a prompt, or of one that is wanted or not.

``ratio`` is ``log pi - log pi_reference`` of a whole response in nats, or its mean over tokens; ``delta`` is the chosen
response's less the rejected one's; ``gap`` is by how much the chosen one is truly better, in units of reward.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_NEAREST = -1e-6  # log-probabilities above this count as this: from there on, float32 has no 1 - p to take a log of


def logistic(delta: Float[Array, "*B"], beta: float, smoothing: float = 0.0) -> Float[Array, "*B"]:
    """``-(1 - e) log sigmoid(beta delta) - e log sigmoid(-beta delta)``.

    Sources: DPO, Rafailov et al. 2023, equation 7; with e, the share of labels taken to be wrong, Mitchell 2023, "A
    note on DPO with noisy preferences" (cDPO).
    """
    loss = -jax.nn.log_sigmoid(beta * delta)
    return loss if not smoothing else (1.0 - smoothing) * loss - smoothing * jax.nn.log_sigmoid(-beta * delta)


def squared_to_margin(delta: Float[Array, "*B"], beta: float) -> Float[Array, "*B"]:
    """``(delta - 1 / (2 beta))^2``: IPO, Azar et al. 2023, equation 17."""
    return jnp.square(delta - 1.0 / (2.0 * beta))


def squared_to_gap(delta: Float[Array, "*B"], gap: Float[Array, "*B"], beta: float, scale: float) -> Float[Array, "*B"]:
    """``(beta delta - scale gap)^2``: RPO, squared, Sun et al. 2025."""
    return jnp.square(beta * delta - scale * gap)


def bernoulli_kl(logits: Float[Array, "*B"], other: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """``KL(Bernoulli(sigmoid(logits)) || Bernoulli(sigmoid(other)))`` in nats.

    RPO, Sun et al. 2025, "Reward-aware preference optimization": with ``scale gap`` first and ``beta delta`` second its
    backward divergence, in the other order its forward one.
    """
    log_sigmoid = jax.nn.log_sigmoid
    yes = jax.nn.sigmoid(logits) * (log_sigmoid(logits) - log_sigmoid(other))
    return yes + jax.nn.sigmoid(-logits) * (log_sigmoid(-logits) - log_sigmoid(-other))


def prospect(
    ratio: Float[Array, "*B"], desirable: Bool[Array, "*B"], divergence: Float[Array, "*B"], beta: float
) -> Float[Array, "*B"]:
    """``1 - sigmoid(beta (ratio - z))`` of a wanted response, ``1 - sigmoid(beta (z - ratio))`` of an unwanted one.

    Source: KTO, Ethayarajh et al. 2024, equation 8.

    Args:
      ratio: of the response.
      desirable: whether it is wanted.
      divergence: z, an estimate of KL(pi || pi_reference), a constant and not negative.
      beta: price of a nat.
    """
    return jax.nn.sigmoid(-beta * jnp.where(desirable, ratio - divergence, divergence - ratio))


def log1mexp(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """``log(1 - e^x)`` for x <= 0; x above -1e-6 counts as that, so that value and gradient stay finite.

    Of the two forms, each is taken where it keeps its digits. Source: Maechler 2012, "Accurately computing
    log(1 - exp(-|a|))".
    """
    x = jnp.minimum(x, _NEAREST)
    return jnp.where(x > -0.6931472, jnp.log(-jnp.expm1(x)), jnp.log1p(-jnp.exp(x)))


def log_odds(logprob: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """``log(p / (1 - p))`` of ``log p``: ORPO, Hong et al. 2024, equation 4."""
    logprob = jnp.minimum(logprob, _NEAREST)
    return logprob - log1mexp(logprob)
