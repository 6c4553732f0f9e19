"""Rows end to end in packs: a model computes packs, while losses and algorithms go on seeing rows.

Rows lie in contiguous blocks on the data shards, and packs hold rows of one shard alone, so that everything here is a
gather inside a shard. Each token of a row has one place in a pack, so the derivative of each gather is the gather that
goes back: nothing is scattered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from yatt_jax.parallel.fill import Filling, MicroShape, PackShape
from yatt_jax.parallel.partition import Partition, constrain
from yatt_jax.types import Inputs

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
    """A ``Filling`` on the devices.

    Attributes:
      order: slots of each data shard in the order of their packs, on that shard.
      start: where each of these rows begins.
      large: number of large micro-batches; as data, so that another number compiles nothing.
      small: number of small ones.
      shape: sizes of both.
    """

    order: Int[Array, "S C"]
    start: Int[Array, "S C"]
    large: Int[Array, ""]
    small: Int[Array, ""]
    shape: PackShape = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows with their layout.

    Attributes:
      rows: a tree of arrays ``[B, ...]`` with ``inputs`` among them: documents one after another, from index 0.
      layout: where they lie in packs.
    """

    rows: Any
    layout: Layout

    def first(self) -> Micro:
        """The first large micro-batch, to see shapes by."""
        return micro(self, 0, self.layout.shape.large)


def place_layout(filling: Filling, shape: PackShape, partition: Partition) -> Layout:
    """Brings a filling to the devices: to each data shard its own part."""

    def spread(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, partition.rows, lambda index: x[index])

    def everywhere(n: int) -> jax.Array:
        return jax.make_array_from_callback((), partition.replicated, lambda _: np.int32(n))

    return Layout(
        spread(filling.order), spread(filling.start), everywhere(filling.large), everywhere(filling.small), shape
    )


@dataclasses.dataclass(frozen=True)
class Micro:
    """One micro-batch inside a jitted function. ``N`` are the tokens of a shard's packs, ``R`` rows it may have.

    Attributes:
      shape: packs on a shard and their length.
      slots: slot of each row in its shard; -1 for none.
      rows: the rows, ``[S R, ...]``; where there is none, zeros.
      inputs: the packs, ``[S packs, length]``.
      token: for each token of the packs, its place among the tokens of the shard's slots; -1 for none.
      place: its place among the tokens of ``rows``; -1 for none.
      first: whether it is the first of its document.
      last: whether it is the last.
      at: for each token of ``rows``, its place in the packs; -1 for none.
    """

    shape: MicroShape
    slots: Int[Array, "S R"]
    rows: Any
    inputs: Inputs
    token: Int[Array, "S N"]
    place: Int[Array, "S N"]
    first: Bool[Array, "S N"]
    last: Bool[Array, "S N"]
    at: Int[Array, "S M"]
    batch: Any = dataclasses.field(repr=False)

    def of_tokens(self, values: jax.Array) -> jax.Array:
        """What an array ``[B, T, ...]`` of the whole batch has at the tokens of the packs: ``[S, N, ...]``."""
        return take(_tokens(values, len(self.slots)), self.token)

    def to_rows(self, values: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
        """Values ``[S, K]`` at the tokens of ``rows``, as ``[S R, T]``; 0 elsewhere.

        Args:
          values: what the model says.
          index: the value that each token of ``rows`` gets, -1 for none.
          back: the inverse: the token of ``rows`` that each value goes to, -1 for none.
        """
        S, R = self.slots.shape
        return constrain(pick(values, index, back).reshape(S * R, -1), "rows", None)

    def from_before(self, values: jax.Array) -> jax.Array:
        """Values ``[S packs, length]`` as ``[S R, T]``, those of the token before: at token t that of t - 1.

        0 at the first token of a document and at padding.
        """
        S = len(self.slots)
        index = jnp.where(take(self.first.astype(jnp.int32), self.at) > 0, -1, jnp.maximum(self.at - 1, -1))
        back = jnp.where(self.last | (self.place < 0), -1, self.place + 1)
        return self.to_rows(values.reshape(S, -1), index, back)

    def put(self, rows: jax.Array, into: jax.Array) -> jax.Array:
        """Writes results ``[S R, ...]`` of the rows into an array ``[S C, ...]`` of the batch."""
        S, R = self.slots.shape
        here = into.reshape(S, -1, *into.shape[1:])
        hit = self.slots[:, None, :] == jnp.arange(here.shape[1])[:, None]  # [S, C, R]
        found = take(rows.reshape(S, R, *rows.shape[1:]), jnp.where(hit.any(-1), jnp.argmax(hit, -1), -1))
        there = hit.any(-1).reshape(*here.shape[:2], *[1] * (rows.ndim - 1))
        return constrain(jnp.where(there, found, here).reshape(into.shape), "rows", *[None] * (into.ndim - 1))


def fold(packed: Packed, body: Callable[[Micro, Carry], Carry], start: Carry) -> Carry:
    """Runs ``body`` over all micro-batches, one after another: as many as the layout says, without compiling anew.

    Not to be differentiated; ``body`` may take derivatives itself.
    """
    shape, layout = packed.layout.shape, packed.layout

    def run(kind: MicroShape, begin: jax.Array | int, count: jax.Array, carry: Carry) -> Carry:
        return jax.lax.fori_loop(
            0, count, lambda i, so_far: body(micro(packed, begin + i * kind.tokens, kind), so_far), carry
        )

    carry = run(shape.large, 0, layout.large, start)
    return run(shape.small, layout.large * shape.large.tokens, layout.small, carry) if shape.small else carry


def micro(packed: Packed, begin: jax.Array | int, shape: MicroShape) -> Micro:
    """The micro-batch whose packs begin at a token of the layout."""
    batch, layout = packed.rows, packed.layout
    S, C = layout.order.shape
    T, N = batch.inputs.tokens.shape[-1], shape.tokens
    start = layout.start - begin
    rank = jnp.sum(start < 0, axis=1, keepdims=True) + jnp.arange(min(C, shape.packs * shape.rows_each))
    starts = jnp.where(rank < C, take(start, jnp.minimum(rank, C - 1)), N)
    real = starts < N
    slots = jnp.where(real, take(layout.order, jnp.minimum(rank, C - 1)), -1)
    starts = jnp.where(real, starts, N)
    lengths = take(jnp.sum(batch.inputs.segments > 0, axis=-1).reshape(S, C), slots)
    # Which row each token of the packs is of, and where in it.
    index = jnp.arange(N)
    row = jax.vmap(lambda s: jnp.searchsorted(s, index, side="right", method="compare_all"))(starts) - 1
    within = index - take(starts, row)
    inside = (row >= 0) & (within < take(lengths, row))
    token = jnp.where(inside, take(slots, row) * T + within, -1)
    place = jnp.where(inside, row * T + within, -1)
    at = jnp.where(jnp.arange(T) < lengths[..., None], starts[..., None] + jnp.arange(T), -1)
    positions = take(_tokens(batch.inputs.positions, S), token)
    first = inside & (positions == 0)
    last = inside & ((within == take(lengths, row) - 1) | jnp.pad(first[:, 1:], ((0, 0), (0, 1))))

    def packs(x: jax.Array) -> jax.Array:
        return constrain(x.reshape(S * shape.packs, shape.length), "rows", None)

    def rows(x: jax.Array) -> jax.Array:
        found = take(x.reshape(S, C, *x.shape[1:]), slots).reshape(-1, *x.shape[1:])
        return constrain(found, "rows", *[None] * (x.ndim - 1))

    return Micro(
        shape=shape,
        slots=slots,
        rows=jax.tree.map(rows, batch),
        inputs=Inputs(
            tokens=packs(take(_tokens(batch.inputs.tokens, S), token)),
            positions=packs(positions),
            segments=packs(jnp.where(inside, jnp.cumsum(first, axis=1), 0)),
        ),
        token=token,
        place=place,
        first=first,
        last=last,
        at=at.reshape(S, -1),
        batch=batch,
    )


def _tokens(x: jax.Array, shards: int) -> jax.Array:
    """``[S C, T, ...]`` to ``[S, C T, ...]``."""
    return x.reshape(shards, -1, *x.shape[2:])


def take(x: Array, index: Int[Array, "S K"]) -> Array:
    """Entries of each shard's ``[N, ...]`` by their places in it; zeros for negative places. ``[S, K, ...]``."""
    found = jax.vmap(lambda a, i: a.at[i].get(mode="promise_in_bounds"))(x, jnp.maximum(index, 0))
    return jnp.where((index >= 0).reshape(*index.shape, *[1] * (x.ndim - 2)), found, jnp.zeros((), x.dtype))


@jax.custom_vjp
def pick(x: Array, index: Int[Array, "S K"], back: Int[Array, "S N"]) -> Array:
    """``take`` of places that are all different; ``back`` is the inverse, so that the derivative is a ``take``, too.

    Args:
      x: ``[S, N, ...]``.
      index: the place that each result is taken from, or -1.
      back: the result that each place goes to, or -1.
    """
    del back
    return take(x, index)


def _pick_forward(x: Array, index: Array, back: Array) -> tuple[Array, Array]:
    return take(x, index), back


def _pick_backward(back: Array, cotangent: Array) -> tuple[Array, None, None]:
    return take(cotangent, back), None, None


pick.defvjp(_pick_forward, _pick_backward)
