"""Device work of the sampling loop: prefill of prompts into the cache, and decoding in compiled chunks.

A row is a prompt with the response written so far; token t of it lives in slot t of the cache. Prefill writes the cache
of all prompt tokens but the last. Decoding feeds one token a row and step, starting with that last one, so that every
token, the first too, is drawn by the same program. The host decides which prompt sits in which row, and when to stop.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

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

# One cache for all layers, or one for each.
Caches: TypeAlias = Cache | tuple[Cache, ...]


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


class Programs:
    """The compiled functions of an engine. Each compiles once for every prompt bucket P: the cache's size follows it.

    ``start``: ``(prompt_tokens [B, P], lengths [B], seed_words [2], sample_id [B]) -> Rows, Caches``. A length of 0 is
    an unused row, which counts as ended.
    ``prefill``: ``(params, caches, prompt_tokens) -> Caches``. The caches given are donated.
    ``decode``: ``(params, caches, rows, controls, halt [B], limit) -> Caches, Rows, steps, running``. Ends the rows in
    ``halt``, then runs until all rows have ended, at most ``limit`` steps; ``running`` is the number that have not.
    Caches and rows given are donated.

    Args:
      model: a language model.
      partition: how rows and weights are laid out.
      rows: number of rows B; a multiple of the partition's row shards.
      max_new_tokens: capacity N for new tokens.
      record_kept: keep the support of each draw.
      cache_dtype: of keys and values; the compute dtype by default.
      unroll: take the layers out of their stack for decoding, with a cache for each (see ``Decoder.unstacked``). Needs
        the weights twice while it decodes; pays on CPUs.
    """

    def __init__(
        self,
        model: Model,
        partition: Partition,
        *,
        rows: int,
        max_new_tokens: int,
        record_kept: bool,
        cache_dtype: str | None,
        unroll: bool,
    ):
        self._model = model
        self._partition = partition
        self._rows = rows
        self._capacity = max_new_tokens
        self._record_kept = record_kept
        self._cache_dtype = cache_dtype
        self._unroll = unroll
        self.start = jax.jit(self._start)
        self.prefill = jax.jit(self._prefill, donate_argnums=1)
        self.decode = jax.jit(self._decode, donate_argnums=(1, 2))

    def _start(
        self, tokens: jax.Array, lengths: jax.Array, seed_words: jax.Array, sample_id: jax.Array
    ) -> tuple[Rows, Caches]:
        last = jnp.maximum(lengths - 1, 0)
        B, N, V8 = self._rows, self._capacity, -(-self._model.config.vocab // 8)
        state = Rows(
            token=jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0],
            position=last,
            count=jnp.zeros_like(last),
            reason=jnp.where(lengths > 0, RUNNING, LENGTH).astype(jnp.int32),
            key=row_keys(seed_words, sample_id),
            tokens=jnp.zeros((B, N), jnp.int32),
            sampled_logprobs=jnp.zeros((B, N), jnp.float32),
            plain_logprobs=jnp.zeros((B, N), jnp.float32),
            kept=jnp.zeros((B, N, V8), jnp.uint8) if self._record_kept else None,
        )
        return self._place(state), self._empty(tokens.shape[1] + N, by_layer=self._unroll)

    def _prefill(self, params: Params, caches: Caches, tokens: jax.Array) -> Caches:
        # Attention within the prompt alone, not over the empty rest of the cache.
        P = tokens.shape[1]
        positions = jnp.broadcast_to(jnp.arange(P), tokens.shape)
        with self._partition.active():
            lm = self._model.bind(params)
            _, own = lm(Inputs(tokens, positions, jnp.ones_like(tokens)), self._empty(P, by_layer=False))
        put = lambda buffer, new: jax.lax.dynamic_update_slice(buffer, new, (0,) * new.ndim)  # noqa: E731
        return self._place_caches(jax.tree.map(put, caches, _by_layer(own) if self._unroll else own))

    def _decode(
        self, params: Params, caches: Caches, state: Rows, controls: Controls, halt: jax.Array, limit: jax.Array
    ) -> tuple[Caches, Rows, jax.Array, jax.Array]:
        lm = self._model.bind(params)
        blocks = lm.decoder.unstacked() if self._unroll else None
        state = dataclasses.replace(state, reason=jnp.where(halt & (state.reason == RUNNING), STOP, state.reason))

        def more(carry: tuple[Caches, Rows, jax.Array]) -> jax.Array:
            return (carry[2] < limit) & jnp.any(carry[1].reason == RUNNING)

        def step(carry: tuple[Caches, Rows, jax.Array]) -> tuple[Caches, Rows, jax.Array]:
            caches, state, steps = carry
            inputs = Inputs(state.token[:, None], state.position[:, None], jnp.ones((self._rows, 1), jnp.int32))
            hidden, caches = lm(inputs, caches, state.position, blocks)
            logits = constrain(lm.logits(hidden[:, 0]), "rows", "act_vocab")
            ban = (state.reason == RUNNING) & (state.count < controls.min_new)
            banned = jnp.where(ban[:, None], controls.stop_ids, self._model.config.vocab)
            # The key of a token is that of its own position, one past the token that is fed.
            uniform = uniforms(state.key, state.position + 1)
            choice = select(logits, controls.filters, banned, uniform, record_kept=self._record_kept)
            return self._place_caches(caches), self._place(_advance(state, controls, choice)), steps + 1

        carry = self._place_caches(caches), self._place(state), jnp.int32(0)
        with self._partition.active():
            caches, state, steps = jax.lax.while_loop(more, step, carry)
        running = jnp.sum((state.reason == RUNNING).astype(jnp.int32))
        return self._place_caches(caches), self._place(state), steps, running

    # The layout is the same at every program's edge: otherwise the second call would compile for the first's output.

    def _place(self, state: Rows) -> Rows:
        def pin(x: jax.Array) -> jax.Array:
            axes = ("rows",) + (None,) * (x.ndim - 1)
            return jax.lax.with_sharding_constraint(x, self._partition.sharding(axes, x.shape))

        return jax.tree.map(pin, state)

    def _place_caches(self, caches: Caches) -> Caches:
        def pin(x: jax.Array) -> jax.Array:
            axes = (None, "rows", "act_kv_heads", None, None)
            return jax.lax.with_sharding_constraint(x, self._partition.sharding(axes, x.shape))

        return jax.tree.map(pin, caches)

    def _empty(self, slots: int, *, by_layer: bool) -> Caches:
        cache = Cache.zeros(self._model.config, self._rows, slots, self._cache_dtype)
        return self._place_caches(_by_layer(cache) if by_layer else cache)


def _by_layer(cache: Cache) -> tuple[Cache, ...]:
    """A cache for each layer, out of one for all."""
    return tuple(jax.tree.map(lambda x, i=i: x[i : i + 1], cache) for i in range(cache.keys.shape[0]))


def _advance(state: Rows, controls: Controls, choice: Choice) -> Rows:
    """Appends the drawn tokens to the rows that run, and ends those that are through.

    A row whose logits are not valid ends without a token.
    """
    running = state.reason == RUNNING
    writes = running & choice.valid
    N = state.tokens.shape[1]
    at = jnp.where(writes, state.count, N)

    @jax.vmap  # by row, so that rows split over devices stay where they are
    def append(buffer: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
        return buffer.at[at].set(new, mode="drop")

    kept = state.kept
    if kept is not None and choice.kept is not None:
        kept = append(kept, at, choice.kept)
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
        tokens=append(state.tokens, at, choice.token),
        sampled_logprobs=append(state.sampled_logprobs, at, choice.sampled_logprob),
        plain_logprobs=append(state.plain_logprobs, at, choice.plain_logprob),
        kept=kept,
    )
