"""Device work of the sampling engine: prompts into the cache of their slots, and decoding in compiled chunks.

A slot holds a row: a prompt with the response written so far; token t of it lives at place t of the slot's cache.
Prefill writes the cache of all prompt tokens but the last. Decoding feeds one token a slot and step, starting with that
last one, so that every token, the first too, is drawn by the same program. The host decides which prompt sits in which
slot, and when to stop.

Prompts reach the cache in packs: several in a row of tokens, told apart by segments, each attending to itself alone. A
prompt longer than a pack follows in pieces, which attend to the slot's cache. What was computed once is copied to every
slot that samples the same prompt.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from yatt_jax.models.attention import cache_places, keys_places_last
from yatt_jax.models.build import Model
from yatt_jax.models.decoder import Cache
from yatt_jax.ops.select import Choice, Filters, row_keys, select, uniforms
from yatt_jax.parallel.partition import Partition, constrain
from yatt_jax.types import Inputs, Params, PyTree

# Why a row ended; RUNNING rows have not, and EMPTY slots hold none.
RUNNING, STOP, LENGTH, INVALID, EMPTY = range(5)

# One cache for all layers, or one for each.
Caches: TypeAlias = Cache | tuple[Cache, ...]
_CACHE_AXES = (None, "rows", "act_kv_heads", None, None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Controls:
    """What the host sets for each slot.

    Attributes:
      filters: shape of the distribution.
      min_new: tokens before which stop ids are not drawn.
      stop_ids: ids that end the row; V or more is none.
    """

    filters: Filters
    min_new: Int[Array, "B"]
    stop_ids: Int[Array, "B S"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """State of the slots between chunks.

    Attributes:
      token: the last token of the row, not yet in the cache.
      position: its index in the row.
      count: response tokens so far.
      limit: the number at which the row is cut.
      reason: RUNNING, or why the row ended.
      key: random key of (seed, sample id).
    """

    token: Int[Array, "B"]
    position: Int[Array, "B"]
    count: Int[Array, "B"]
    limit: Int[Array, "B"]
    reason: Int[Array, "B"]
    key: UInt32[Array, "B 2"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admission:
    """Rows that start or go on: ``new`` marks their slots; the values of other slots are not read."""

    new: Bool[Array, "B"]
    token: Int[Array, "B"]
    position: Int[Array, "B"]
    count: Int[Array, "B"]
    limit: Int[Array, "B"]
    sample_id: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copies:
    """Tokens to bring to slots, for each lane: the first ``count`` of its entries, one after another.

    Attributes:
      source: pack, or slot, that they are taken from.
      offset: where they begin in the pack; 0 for slots.
      slot: slot that they go to.
      count: number of entries.
    """

    source: Int[Array, "R M"]
    offset: Int[Array, "R M"]
    slot: Int[Array, "R M"]
    count: Int[Array, "R"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn:
    """What one chunk drew: of each slot, the first ``count`` columns.

    Attributes:
      count: tokens drawn in the chunk.
      tokens: ids.
      sampled_logprobs: under the distribution drawn from.
      plain_logprobs: under the temperature alone.
      kept: support of each draw as bits, or None.
    """

    count: Int[Array, "B"]
    tokens: Int[Array, "B C"]
    sampled_logprobs: Float[Array, "B C"]
    plain_logprobs: Float[Array, "B C"]
    kept: UInt8[Array, "B C V8"] | None


class Programs:
    """The compiled functions of an engine. Each compiles once for a number of slots, ``prefill`` for a number of packs.

    Arrays with a leading R have an entry for each lane (see ``slots``); numbers of slots and packs in them count from
    the beginning of the lane's row shard.

    ``lay_out``: ``params -> layers``, the weights as the other programs want them beside ``params``.
    ``start``: ``() -> Caches, Rows``, all slots empty.
    ``prefill``: ``(params, layers, caches, packs, copies) -> Caches``: computes packs of prompts, and copies each
    prompt to its slots.
    ``extend``: ``(params, layers, caches, tokens [R, T], start [R], slot [R]) -> Caches``: a further piece of a prompt
    in each lane; places outside the cache are dropped, so a start at its end does nothing.
    ``copy``: ``(caches, copies) -> Caches``, from slot to slot.
    ``clear``: ``(caches, slots [B] bool) -> Caches``: puts zeros. What lies in a slot beyond its row gets a weight of
    zero, and zero times NaN is NaN.
    ``admit``: ``(rows, admission, seed_words [2]) -> Rows``.
    ``decode``: ``(params, layers, caches, rows, controls, halt [B], limit, patience) -> Caches, Rows, steps, running,
    Drawn``. Ends the rows in ``halt``, then runs until all rows have ended, or ``patience`` of them, at most ``limit``
    steps; ``running`` is the number that have not ended.
    ``pick``: ``(caches, rows, slots [B']) -> Caches, Rows``: fewer slots, by their numbers within each shard.
    Caches and rows given are donated, except to ``pick``.

    Args:
      model: a language model.
      partition: how rows and weights are laid out.
      rows: number of slots B; a multiple of the partition's row shards.
      capacity: tokens that a slot can hold, S.
      chunk: most steps of one call of ``decode``, C.
      record_kept: keep the support of each draw.
      cache_dtype: of keys and values; the compute dtype by default.
      unroll: take the layers out of their stack, with a cache for each (see ``Decoder.unstack``). Needs the weights
        twice while it samples; pays on CPUs.

    Attributes:
      capacity: S, the tokens asked for or some more.
    """

    def __init__(
        self,
        model: Model,
        partition: Partition,
        *,
        rows: int,
        capacity: int,
        chunk: int,
        record_kept: bool,
        cache_dtype: str | None,
        unroll: bool,
    ):
        self._model = model
        self._partition = partition
        self._rows = rows
        self.capacity = cache_places(partition.device, capacity)
        self._chunk = chunk
        self._record_kept = record_kept
        self._cache_dtype = cache_dtype
        self._unroll = unroll
        self.lay_out = jax.jit(self._lay_out)
        self.start = jax.jit(self._start)
        self.prefill = jax.jit(self._prefill, donate_argnums=2)
        self.extend = jax.jit(self._extend, donate_argnums=2)
        self.copy = jax.jit(self._copy, donate_argnums=0)
        self.clear = jax.jit(self._clear, donate_argnums=0)
        self.admit = jax.jit(self._admit, donate_argnums=0)
        self.decode = jax.jit(self._decode, donate_argnums=(2, 3))
        self.pick = jax.jit(self._pick)

    def _lay_out(self, params: Params) -> PyTree:
        return self._model.bind(params).decoder.unstack() if self._unroll else None

    def _start(self) -> tuple[Caches, Rows]:
        zeros = jnp.zeros(self._rows, jnp.int32)
        keys = jnp.zeros((self._rows, 2), jnp.uint32)
        rows = Rows(zeros, zeros, zeros, zeros, zeros + EMPTY, keys)
        last = keys_places_last(self._partition.device)
        cache = Cache.zeros(self._model.config, self._rows, self.capacity, self._cache_dtype, places_last=last)
        return self._place_caches(_by_layer(cache) if self._unroll else cache), self._place(rows)

    def _run(
        self, params: Params, layers: PyTree, inputs: Inputs, *cache: Any, **how: Any
    ) -> tuple[Any, jax.Array, Any]:
        lm = self._model.bind(params)
        blocks = lm.decoder.blocks(layers) if self._unroll else None
        hidden, cache_out = lm(inputs, *(cache or (None,)), **how, blocks=blocks)
        return lm, hidden, cache_out

    def _prefill(self, params: Params, layers: PyTree, caches: Caches, packs: Inputs, copies: Copies) -> Caches:
        with self._partition.active():
            *_, fresh = self._run(params, layers, packs, collect=True)
        # A copy takes a pack's length from its offset on: what follows the prompt is never read.
        wide = jax.tree.map(lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, x.shape[3]), (0, 0)]), fresh)
        wide = jax.tree.map(_laid_out_as, wide, caches, is_leaf=_is_cache)
        length = min(packs.tokens.shape[1], self.capacity)
        return self._copied(caches, wide, copies, length)

    def _extend(
        self, params: Params, layers: PyTree, caches: Caches, tokens: jax.Array, start: jax.Array, slot: jax.Array
    ) -> Caches:
        def take(caches: Caches, slot: jax.Array) -> Caches:
            return jax.tree.map(lambda x: jnp.take(x, slot, axis=1), caches)

        def put(caches: Caches, own: Caches, slot: jax.Array) -> Caches:
            for lane in range(slot.shape[0]):
                put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=slot[lane], axis=1)
                caches = jax.tree.map(lambda x, y, put=put, lane=lane: put(x, y[:, lane : lane + 1]), caches, own)
            return caches

        own = self._by_shard(take, caches)(caches, slot)
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        with self._partition.active():
            *_, own = self._run(params, layers, Inputs(tokens, positions, jnp.ones_like(tokens)), own, start)
        return self._by_shard(put, caches)(caches, own, slot)

    def _copy(self, caches: Caches, copies: Copies) -> Caches:
        return self._copied(caches, None, copies, self.capacity)

    def _clear(self, caches: Caches, slots: jax.Array) -> Caches:
        return self._place_caches(jax.tree.map(lambda x: jnp.where(slots[:, None, None, None], 0, x), caches))

    def _copied(self, caches: Caches, source: Caches | None, copies: Copies, length: int) -> Caches:
        """``length`` tokens of each entry of ``copies``, from ``source`` or else the caches themselves."""

        def local(caches: Caches, source: Caches | None, copies: Copies) -> Caches:
            for lane in range(copies.count.shape[0]):

                def one(i: jax.Array, caches: Caches, lane: int = lane) -> Caches:
                    def move(to: jax.Array, of: jax.Array, places: int) -> jax.Array:
                        begin = [0, copies.source[lane, i], 0, 0, 0]
                        size = [of.shape[0], 1, *of.shape[2:]]
                        begin[places], size[places] = copies.offset[lane, i], length
                        piece = jax.lax.dynamic_slice(of, begin, size)
                        return jax.lax.dynamic_update_slice(
                            to, piece.astype(to.dtype), (0, copies.slot[lane, i], 0, 0, 0)
                        )

                    def both(to: Cache, of: Cache) -> Cache:
                        keys = move(to.keys, of.keys, 4 if to.places_last else 3)
                        return Cache(keys, move(to.values, of.values, 3), to.places_last)

                    return jax.tree.map(both, caches, caches if source is None else source, is_leaf=_is_cache)

                caches = jax.lax.fori_loop(0, copies.count[lane], one, caches)
            return caches

        if source is None:
            return self._by_shard(lambda caches, copies: local(caches, None, copies), caches)(caches, copies)
        return self._by_shard(local, caches)(caches, source, copies)

    def _by_shard(self, function: Any, like: Caches) -> Any:
        """A function of caches and arrays with a leading shard axis, run by every row shard on its own."""
        spec = functools.partial(self._partition.spec, _CACHE_AXES)
        rows = PartitionSpec(self._partition.rules["rows"] or None)
        caches = jax.tree.map(lambda x: spec(x.shape), like)

        def run(first: Caches, *others: Any) -> Any:
            specs = [jax.tree.map(lambda x: spec(x.shape) if x.ndim == 5 else rows, other) for other in others]
            mapped = jax.shard_map(
                function, mesh=self._partition.mesh, in_specs=(caches, *specs), out_specs=caches, check_vma=False
            )
            return mapped(first, *others)

        return run

    def _admit(self, rows: Rows, admission: Admission, seed_words: jax.Array) -> Rows:
        new = admission.new
        keys = row_keys(seed_words, admission.sample_id)
        return self._place(
            Rows(
                token=jnp.where(new, admission.token, rows.token),
                position=jnp.where(new, admission.position, rows.position),
                count=jnp.where(new, admission.count, rows.count),
                limit=jnp.where(new, admission.limit, rows.limit),
                reason=jnp.where(new, RUNNING, rows.reason),
                key=jnp.where(new[:, None], keys, rows.key),
            )
        )

    def _pick(self, caches: Caches, rows: Rows, slots: jax.Array) -> tuple[Caches, Rows]:
        def take(caches: Caches, slots: jax.Array) -> Caches:
            return jax.tree.map(lambda x: jnp.take(x, slots, axis=1), caches)

        caches = self._by_shard(take, caches)(caches, slots)
        shards = self._partition.row_shards
        own = slots.reshape(shards, -1)

        def pick(x: jax.Array) -> jax.Array:
            by_shard = x.reshape(shards, -1, *x.shape[1:])
            return jax.vmap(lambda values, at: values[at])(by_shard, own).reshape(slots.shape + x.shape[1:])

        return self._place_caches(caches), self._place(jax.tree.map(pick, rows))

    def _decode(
        self,
        params: Params,
        layers: PyTree,
        caches: Caches,
        rows: Rows,
        controls: Controls,
        halt: jax.Array,
        limit: jax.Array,
        patience: jax.Array,
    ) -> tuple[Caches, Rows, jax.Array, jax.Array, Drawn]:
        rows = dataclasses.replace(rows, reason=jnp.where(halt & (rows.reason == RUNNING), STOP, rows.reason))
        enough = jnp.maximum(jnp.sum(rows.reason == RUNNING) - patience, 0)
        begin, B = rows.count, rows.count.shape[0]

        def more(carry: tuple[Caches, Rows, Drawn, jax.Array]) -> jax.Array:
            return (carry[3] < limit) & (jnp.sum(carry[1].reason == RUNNING) > enough)

        def step(carry: tuple[Caches, Rows, Drawn, jax.Array]) -> tuple[Caches, Rows, Drawn, jax.Array]:
            caches, rows, drawn, steps = carry
            inputs = Inputs(rows.token[:, None], rows.position[:, None], jnp.ones((B, 1), jnp.int32))
            # A slot whose row has ended writes nothing: another prompt may be on its way into it.
            place = jnp.where(rows.reason == RUNNING, rows.position, self.capacity)
            lm, hidden, caches = self._run(params, layers, inputs, caches, place)
            logits = constrain(lm.logits(hidden[:, 0]), "rows", "act_vocab")
            ban = (rows.reason == RUNNING) & (rows.count < controls.min_new)
            banned = jnp.where(ban[:, None], controls.stop_ids, self._model.config.vocab)
            # The key of a token is that of its own position, one past the token that is fed.
            uniform = uniforms(rows.key, rows.position + 1)
            choice = select(logits, controls.filters, banned, uniform, record_kept=self._record_kept)
            drawn = jax.tree.map(self._pin, _noted(drawn, choice, steps))
            return self._place_caches(caches), self._place(_advance(rows, controls, choice)), drawn, steps + 1

        carry = self._place_caches(caches), self._place(rows), jax.tree.map(self._pin, self._blank(B)), jnp.int32(0)
        with self._partition.active():
            caches, rows, drawn, steps = jax.lax.while_loop(more, step, carry)
        drawn = dataclasses.replace(drawn, count=rows.count - begin)
        running = jnp.sum((rows.reason == RUNNING).astype(jnp.int32))
        return self._place_caches(caches), self._place(rows), steps, running, jax.tree.map(self._pin, drawn)

    def _blank(self, rows: int) -> Drawn:
        shape = rows, self._chunk
        width = -(-self._model.config.vocab // 8)
        return Drawn(
            count=jnp.zeros(rows, jnp.int32),
            tokens=jnp.zeros(shape, jnp.int32),
            sampled_logprobs=jnp.zeros(shape, jnp.float32),
            plain_logprobs=jnp.zeros(shape, jnp.float32),
            kept=jnp.zeros((*shape, width), jnp.uint8) if self._record_kept else None,
        )

    # The layout is the same at every program's edge: otherwise the second call would compile for the first's output.

    def _pin(self, x: jax.Array) -> jax.Array:
        axes = ("rows",) + (None,) * (x.ndim - 1)
        return jax.lax.with_sharding_constraint(x, self._partition.sharding(axes, x.shape))

    def _place(self, rows: Rows) -> Rows:
        return jax.tree.map(self._pin, rows)

    def _place_caches(self, caches: Caches) -> Caches:
        def pin(x: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, self._partition.sharding(_CACHE_AXES, x.shape))

        return jax.tree.map(pin, caches)


def _is_cache(x: Any) -> bool:
    return isinstance(x, Cache)


def _laid_out_as(cache: Cache, other: Cache) -> Cache:
    return cache.laid_out(other.places_last)


def _by_layer(cache: Cache) -> tuple[Cache, ...]:
    """A cache for each layer, out of one for all."""
    return tuple(jax.tree.map(lambda x, i=i: x[i : i + 1], cache) for i in range(cache.keys.shape[0]))


def _noted(drawn: Drawn, choice: Choice, step: jax.Array) -> Drawn:
    """Puts a step's draws into its column: rows that run in a chunk have run since its first step."""

    def put(buffer: jax.Array | None, new: jax.Array | None) -> Any:
        return buffer if buffer is None or new is None else buffer.at[:, step].set(new)

    return Drawn(
        count=drawn.count,
        tokens=put(drawn.tokens, choice.token),
        sampled_logprobs=put(drawn.sampled_logprobs, choice.sampled_logprob),
        plain_logprobs=put(drawn.plain_logprobs, choice.plain_logprob),
        kept=put(drawn.kept, choice.kept),
    )


def _advance(rows: Rows, controls: Controls, choice: Choice) -> Rows:
    """Moves the rows that run on by the token drawn, and ends those that are through.

    A row whose logits are not valid ends without a token.
    """
    running = rows.reason == RUNNING
    writes = running & choice.valid
    count = rows.count + writes
    reason = jnp.where(count >= rows.limit, LENGTH, RUNNING)
    reason = jnp.where(jnp.any(choice.token[:, None] == controls.stop_ids, axis=1), STOP, reason)
    reason = jnp.where(choice.valid, reason, INVALID)
    return Rows(
        token=jnp.where(writes, choice.token, rows.token),
        position=rows.position + writes,
        count=count,
        limit=rows.limit,
        reason=jnp.where(running, reason, rows.reason),
        key=rows.key,
    )
