"""Forward passes over sampled rows: what the models say about them, without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from yatt_jax.controller.update import join_micro, split_micro
from yatt_jax.models.build import Model
from yatt_jax.ops.logprobs import logprobs_from_hidden
from yatt_jax.parallel.partition import Partition
from yatt_jax.types import Logprobs, Params, PyTree, Values

Forward = Callable[[Params, Any, ArrayLike], PyTree]


def make_forward(model: Model, *, vocab_chunk: int, capacity: int, row_shards: int) -> Forward:
    """The function from parameters and rows to a model's outputs.

    Args:
      model: a language model gives ``Logprobs``, a critic ``Values``.
      vocab_chunk: tokens whose logits exist at one time.
      capacity: most response tokens a row can have; only their logits are computed.
      row_shards: parts that the rows are split into.

    Returns:
      ``forward(params, rows, temperature)``; ``rows`` has ``inputs``, ``response_mask`` and ``kept``.
    """

    def lm(params: Params, rows: Any, temperature: ArrayLike) -> Logprobs:
        module = model.bind(params)
        hidden, _ = module(rows.inputs)
        return logprobs_from_hidden(
            hidden,
            module.output_matrix(),
            rows.inputs.tokens,
            temperature=jnp.asarray(temperature),
            softcap=model.config.final_softcap,
            kept=rows.kept,
            mask=rows.response_mask,
            capacity=capacity,
            chunk=vocab_chunk,
            row_shards=row_shards,
        )

    def critic(params: Params, rows: Any, temperature: ArrayLike) -> Values:
        del temperature
        at_token = model.bind(params)(rows.inputs)[..., 0]
        # The value of token t is what the critic says having read the tokens before it.
        return Values(jnp.pad(at_token[..., :-1], [(0, 0)] * (at_token.ndim - 1) + [(1, 0)]))

    return lm if model.kind == "lm" else critic


def make_score(forward: Forward, partition: Partition, micro: int) -> Callable[[Params, Any, ArrayLike], PyTree]:
    """A compiled scorer: ``forward`` over ``micro`` slices of the rows, one after another.

    Rows are cut so that every slice takes its share from every data shard.
    """

    def score(params: Params, rows: Any, temperature: ArrayLike) -> PyTree:
        with partition.active():
            if micro == 1:
                return forward(params, rows, temperature)
            outputs = jax.lax.map(lambda part: forward(params, part, temperature), split_micro(rows, micro))
            return join_micro(outputs, rows.response_mask.shape[0])

    return jax.jit(score)
