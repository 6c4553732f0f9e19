"""From losses of tokens to one loss: the ways to weigh long and short responses, as sums and weights."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from yatt_jax.ops.masking import masked_sum
from yatt_jax.ops.options import CountOrZero, check
from yatt_jax.types import Ratio


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """How token losses become one loss; see ``aggregate``. ``length`` is for ``fixed_length`` alone."""

    how: Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"] = "token_mean"
    length: CountOrZero = 0  # tokens

    def __post_init__(self) -> None:
        given, wanted = self.length > 0, self.how == "fixed_length"
        check(self, (given == wanted, f"length = {self.length}: above 0 with how = 'fixed_length', 0 without"))


def aggregate(x: Float[Array, "*B T"], mask: Float[Array, "*B T"], options: Aggregation) -> Ratio:
    """Adds up token losses; with n_b the tokens of row b that count, and N the rows that have any:

    - ``token_mean``: ``sum_bt x / sum_b n_b``, every token weighs the same (DAPO, Yu et al. 2025)
    - ``sequence_mean``: ``sum_b (sum_t x / n_b) / N``, every response weighs the same (GRPO, Shao et al. 2024)
    - ``sequence_sum``: ``sum_b (sum_t x) / N``
    - ``fixed_length``: ``sum_bt x / (N length)``, without length bias (Dr. GRPO, Liu et al. 2025)

    Weights do not depend on parameters, so totals and weights may be added over any split of the rows. A row without
    tokens adds 0 to both.

    Args:
      x: token losses; what stands outside the mask does not matter.
      mask: 1 at tokens that count.
      options: which of them.
    """
    tokens = jnp.sum(mask, axis=-1)
    rows = jnp.sum(tokens > 0, dtype=jnp.float32)
    sums = masked_sum(x, mask, axis=-1)
    if options.how == "token_mean":
        return Ratio(jnp.sum(sums), jnp.sum(tokens))
    if options.how == "sequence_mean":
        return Ratio(jnp.sum(sums / jnp.maximum(tokens, 1.0)), rows)
    return Ratio(jnp.sum(sums), rows * options.length if options.how == "fixed_length" else rows)
