"""Forward passes over sampled rows: what the models say about them, and the scores that need no gradients."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from yatt_jax.models.build import Model
from yatt_jax.ops.logprobs import token_scores
from yatt_jax.parallel.pack import Micro, Packed, fold, pick, take
from yatt_jax.parallel.partition import Partition, constrain
from yatt_jax.types import Logprobs, Params, PyTree, Values

Forward = Callable[[Params, Micro, ArrayLike], PyTree]


def make_forward(model: Model, *, vocab_chunk: int) -> Forward:
    """The function from parameters and a micro-batch to a model's outputs.

    Args:
      model: a language model gives ``Logprobs``, a critic ``Values``.
      vocab_chunk: tokens whose logits exist at one time on each data shard.

    Returns:
      ``forward(params, micro, temperature)``. Its rows have ``inputs``, ``response_mask`` and ``kept``; the outputs are
      those of the rows, 0 where they have no token and, in ``Logprobs``, outside the response.
    """

    def lm(params: Params, micro: Micro, temperature: ArrayLike) -> Logprobs:
        module = model.bind(params)
        hidden, _ = module(micro.inputs)
        return _logprobs(micro, hidden, module.output_matrix(), temperature, model.config.final_softcap, vocab_chunk)

    def critic(params: Params, micro: Micro, temperature: ArrayLike) -> Values:
        del temperature
        # The value of token t is what the critic says having read the tokens before it.
        return Values(micro.from_before(model.bind(params)(micro.inputs)[..., 0]))

    return lm if model.kind == "lm" else critic


def _logprobs(
    micro: Micro, hidden: jax.Array, matrix: jax.Array, temperature: ArrayLike, softcap: float, chunk: int
) -> Logprobs:
    """Scores of the response tokens: they are gathered first, so that no other costs a product with the matrix."""
    batch, S = micro.batch, len(micro.slots)
    tokens = micro.inputs.tokens.reshape(S, -1)
    # The first token of a row is predicted by nothing.
    wanted = (micro.of_tokens(batch.response_mask) > 0) & ~micro.first
    order = jnp.argsort(~wanted, axis=1, stable=True)
    count = jnp.sum(wanted, axis=1, keepdims=True)
    real = jnp.arange(order.shape[1]) < count
    rank = jnp.where(wanted, jnp.cumsum(wanted, axis=1) - 1, -1)
    before = jnp.pad(rank[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    predicting = pick(hidden.reshape(S, -1, hidden.shape[-1]), jnp.where(real, order - 1, -1), before)
    kept = batch.kept
    if kept is not None:
        kept = take(kept.reshape(S, -1, kept.shape[-1]), jnp.where(real, take(micro.token, order), -1))
    scores = token_scores(
        constrain(predicting, "rows", None, None),
        matrix,
        take(tokens, order),
        count=jnp.max(count),
        temperature=jnp.asarray(temperature),
        softcap=softcap,
        kept=kept,
        chunk=chunk,
        row_shards=S,
    )
    index = jnp.where(micro.at >= 0, take(rank, micro.at), -1)
    back = jnp.where(real, take(micro.place, order), -1)
    return Logprobs(*(micro.to_rows(score, index, back) for score in scores))


def make_score(forward: Forward, partition: Partition) -> Callable[[Params, Packed, ArrayLike], PyTree]:
    """A compiled scorer of packed rows, one micro-batch after another; outputs ``[B, T]`` in the rows' own order."""

    def score(params: Params, packed: Packed, temperature: ArrayLike) -> PyTree:
        with partition.active():
            size = packed.rows.response_mask.shape

            def add(micro: Micro, so_far: PyTree) -> PyTree:
                return jax.tree.map(micro.put, forward(params, micro, temperature), so_far)

            kinds = jax.eval_shape(lambda: forward(params, packed.first(), temperature))
            start = jax.tree.map(lambda x: constrain(jnp.zeros(size, x.dtype), "rows", None), kinds)
            return fold(packed, add, start)

    return jax.jit(score)
