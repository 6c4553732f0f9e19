"""How much better than expected each token did."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def gae(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Generalised advantage estimation over the tokens that count.

    ``delta_t = r_t + gamma V_next - V_t`` and ``A_t = delta_t + gamma lam A_next``, where "next" is the next token that
    counts: tokens in between (tool output, observations) are stepped over without discount. After the last one, both
    are 0. Returns are ``A_t + V_t``. Source: Schulman et al. 2016.

    Args:
      rewards: reward of writing token t.
      values: estimate before token t is written.
      mask: 1 at tokens that count.
      gamma: discount.
      lam: how far advantages look past the critic: 0 one token, 1 to the end.

    Returns:
      Advantages and returns, 0 where the mask is 0.
    """

    def step(after, token):
        advantage_after, value_after = after
        reward, value, counts = token
        advantage = reward + gamma * value_after - value + gamma * lam * advantage_after
        after = (jnp.where(counts, advantage, advantage_after), jnp.where(counts, value, value_after))
        return after, jnp.where(counts, advantage, 0.0)

    end = jnp.zeros(rewards.shape[0], rewards.dtype)
    tokens = (rewards.T, values.T, mask.T > 0)
    _, advantages_TB = jax.lax.scan(step, (end, end), tokens, reverse=True)
    advantages = advantages_TB.T
    return advantages, jnp.where(mask > 0, advantages + values, 0.0)


def returns_to_go(rewards: Float[Array, "B T"], mask: Float[Array, "B T"], gamma: float) -> Float[Array, "B T"]:
    """``G_t = r_t + gamma G_next``, where "next" is the next token that counts; 0 where the mask is 0.

    Source: Williams 1992 (REINFORCE). With rewards [1, 2, 4] and gamma .5: [3, 4, 4].

    Args:
      rewards: reward of writing token t.
      mask: 1 at tokens that count; the others are stepped over without discount.
      gamma: discount of a token; 0 leaves each token its own reward, 1 the sum of all that follow.
    """
    return gae(rewards, jnp.zeros_like(rewards), mask, gamma=gamma, lam=1.0)[0]
