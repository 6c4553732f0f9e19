"""Device work of the sampling loop: prefill of prompts into the cache, and decoding in compiled chunks.

A row is a prompt with the response written so far; token t of it lives in slot t of the cache. Prefill writes the cache
of all prompt tokens but the last. Decoding feeds one token a row and step, starting with that last one, so that every
token, the first too, is drawn by the same program. The host decides which prompt sits in which row, and when to stop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8, UInt32

from yatt_jax.models.build import Model
from yatt_jax.models.decoder import Cache
from yatt_jax.ops.select import Choice, Filters, row_keys, select, uniforms
from yatt_jax.parallel.partition import Partition, constrain
from yatt_jax.types import Inputs, Params

# Why a row ended; RUNNING rows have not.
RUNNING, STOP, LENGTH, INVALID = 0, 1, 2, 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Controls:
    """What the host sets for each row.

    Attributes:
      filters: shape of the distribution.
      min_new: tokens before which stop ids are not drawn.
      max_new: tokens after which the row is cut.
      stop_ids: ids that end the row; V or more is none.
    """

    filters: Filters
    min_new: Int[Array, "B"]
    max_new: Int[Array, "B"]
    stop_ids: Int[Array, "B S"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """State of the rows between chunks; N is the capacity for new tokens.

    Attributes:
      token: the last token of the row, not yet in the cache.
      position: its index in the row.
      count: new tokens written.
      reason: RUNNING, or why the row ended.
      key: random key of (seed, sample id).
      tokens: new tokens.
      sampled_logprobs: under the distribution drawn from.
      plain_logprobs: under the temperature alone.
      kept: support of each draw as bits, or None.
    """

    token: Int[Array, "B"]
    position: Int[Array, "B"]
    count: Int[Array, "B"]
    reason: Int[Array, "B"]
    key: UInt32[Array, "B 2"]
    tokens: Int[Array, "B N"]
    sampled_logprobs: Float[Array, "B N"]
    plain_logprobs: Float[Array, "B N"]
    kept: UInt8[Array, "B N V8"] | None


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled functions of an engine. Each compiles once for every prompt bucket (the cache's size follows it).

    Attributes:
      start: ``(prompt_tokens [B, P], lengths [B], seed_words [2], sample_id [B]) -> Rows, Cache``; a length of 0 is an
        unused row, which counts as ended.
      prefill: ``(params, cache, prompt_tokens) -> cache``; the cache is donated.
      decode: ``(params, cache, rows, controls, halt [B], limit) -> cache, rows, steps``; ends the rows in
        ``halt``, then runs until all rows have ended, at most ``limit`` steps. Cache and rows are donated.
    """

    start: Callable[..., tuple[Rows, Cache]]
    prefill: Callable[..., Cache]
    decode: Callable[..., tuple[Cache, Rows, jax.Array]]


def make_programs(
    model: Model, partition: Partition, *, rows: int, max_new_tokens: int, record_kept: bool, cache_dtype: str | None
) -> Programs:
    """Builds the jitted functions of a sampling loop; nothing compiles before the first call.

    Args:
      model: a language model.
      partition: how rows and weights are laid out.
      rows: number of rows B; a multiple of the partition's row shards.
      max_new_tokens: capacity N for new tokens.
      record_kept: keep the support of each draw.
      cache_dtype: of keys and values; the compute dtype by default.
    """
    config = model.config

    def rows_sharding(shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
        return partition.sharding(("rows",) + (None,) * (len(shape) - 1), shape)

    def place(tree: Any) -> Any:
        # The same layout at every program's edge: otherwise a second call would compile again for the first's output.
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows_sharding(x.shape)), tree)

    def place_cache(cache: Cache) -> Cache:
        axes = (None, "rows", "act_kv_heads", None, None)
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, partition.sharding(axes, x.shape)), cache)

    def start(tokens: jax.Array, lengths: jax.Array, seed_words: jax.Array, sample_id: jax.Array) -> tuple[Rows, Cache]:
        last = jnp.maximum(lengths - 1, 0)
        N, V8 = max_new_tokens, -(-config.vocab // 8)
        state = Rows(
            token=jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0],
            position=last,
            count=jnp.zeros_like(last),
            reason=jnp.where(lengths > 0, RUNNING, LENGTH).astype(jnp.int32),
            key=row_keys(seed_words, sample_id),
            tokens=jnp.zeros((rows, N), jnp.int32),
            sampled_logprobs=jnp.zeros((rows, N), jnp.float32),
            plain_logprobs=jnp.zeros((rows, N), jnp.float32),
            kept=jnp.zeros((rows, N, V8), jnp.uint8) if record_kept else None,
        )
        return place(state), place_cache(Cache.zeros(config, rows, tokens.shape[1] + N, cache_dtype))

    def prefill(params: Params, cache: Cache, tokens: jax.Array) -> Cache:
        # Attention within the prompt alone, not over the empty rest of the cache.
        P = tokens.shape[1]
        with partition.active():
            own = place_cache(Cache.zeros(config, rows, P, cache_dtype))
            positions = jnp.broadcast_to(jnp.arange(P), tokens.shape)
            _, own = model.bind(params)(Inputs(tokens, positions, jnp.ones_like(tokens)), own)
        put = lambda buffer, new: jax.lax.dynamic_update_slice(buffer, new, (0,) * new.ndim)  # noqa: E731
        return place_cache(jax.tree.map(put, cache, own))

    def decode(
        params: Params, cache: Cache, state: Rows, controls: Controls, halt: jax.Array, limit: jax.Array
    ) -> tuple[Cache, Rows, jax.Array]:
        state = dataclasses.replace(state, reason=jnp.where(halt & (state.reason == RUNNING), STOP, state.reason))

        def more(carry: tuple[Cache, Rows, jax.Array]) -> jax.Array:
            return (carry[2] < limit) & jnp.any(carry[1].reason == RUNNING)

        def step(carry: tuple[Cache, Rows, jax.Array]) -> tuple[Cache, Rows, jax.Array]:
            cache, state, steps = carry
            lm = model.bind(params)
            inputs = Inputs(state.token[:, None], state.position[:, None], jnp.ones((rows, 1), jnp.int32))
            hidden, cache = lm(inputs, cache, state.position)
            logits = constrain(lm.logits(hidden[:, 0]), "rows", "act_vocab")
            running = state.reason == RUNNING
            ban = running & (state.count < controls.min_new)
            banned = jnp.where(ban[:, None], controls.stop_ids, config.vocab)
            uniform = uniforms(state.key, state.position + 1)
            choice = select(logits, controls.filters, banned, uniform, record_kept=record_kept)
            return place_cache(cache), place(_advance(state, controls, choice)), steps + 1

        with partition.active():
            cache, state, steps = jax.lax.while_loop(more, step, (place_cache(cache), place(state), jnp.int32(0)))
        return place_cache(cache), place(state), steps

    return Programs(jax.jit(start), jax.jit(prefill, donate_argnums=1), jax.jit(decode, donate_argnums=(1, 2)))


def _advance(state: Rows, controls: Controls, choice: Choice) -> Rows:
    """Appends the drawn tokens to the rows that run, and ends those that are through.

    A row whose logits are not valid ends without a token.
    """
    running = state.reason == RUNNING
    writes = running & choice.valid
    N = state.tokens.shape[1]
    at = jnp.arange(state.tokens.shape[0]), jnp.where(writes, state.count, N)

    def append(buffer: jax.Array, new: jax.Array) -> jax.Array:
        return buffer.at[at].set(new, mode="drop", unique_indices=True)

    kept = state.kept
    if kept is not None and choice.kept is not None:
        kept = append(kept, choice.kept)
    count = state.count + writes
    reason = jnp.where(count >= controls.max_new, LENGTH, RUNNING)
    reason = jnp.where(jnp.any(choice.token[:, None] == controls.stop_ids, axis=1), STOP, reason)
    reason = jnp.where(choice.valid, reason, INVALID)
    return Rows(
        token=jnp.where(writes, choice.token, state.token),
        position=state.position + writes,
        count=count,
        reason=jnp.where(running, reason, state.reason),
        key=state.key,
        tokens=append(state.tokens, choice.token),
        sampled_logprobs=append(state.sampled_logprobs, choice.sampled_logprob),
        plain_logprobs=append(state.plain_logprobs, choice.plain_logprob),
        kept=kept,
    )
