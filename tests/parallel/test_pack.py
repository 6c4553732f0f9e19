from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.parallel.balance import balance
from yatt_jax.parallel.fill import MicroShape, PackShape, fill
from yatt_jax.parallel.pack import Micro, Packed, fold, place_layout
from yatt_jax.parallel.partition import Partition, Split, make_partitions
from yatt_jax.types import Inputs, PyTree

T = 12
LENGTHS = np.random.default_rng(0).integers(0, T + 1, 24)
SHAPES = {
    "whole": PackShape(MicroShape(24, T)),
    "long": PackShape(MicroShape(1, 40)),
    "two kinds": PackShape(MicroShape(2, 16), MicroShape(1, 8)),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    inputs: Inputs
    number: Any


def partition(shards: int) -> Partition:
    return make_partitions(Split(), Split(), jax.devices()[:shards])[0]


def documents_of(source: np.ndarray, documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Which document of its row each token of the slots is in, from 1 (0: none), and its place there."""
    lengths = np.where(source >= 0, LENGTHS[source], 0)[:, None]
    second = lengths // 2 if documents == 2 else lengths
    place = np.arange(T)
    segments = np.where(place < lengths, 1 + (place >= second), 0).astype(np.int32)
    return segments, np.where(segments == 2, place - second, np.where(segments == 1, place, 0)).astype(np.int32)


def packed_rows(shards: int, shape: PackShape, documents: int = 1) -> tuple[Packed, np.ndarray]:
    """Rows over the shards, and the number of each slot's row. A token is 100 times its document plus its place."""
    where, capacity = partition(shards), 24 // shards + 1
    assigned = balance(LENGTHS.astype(float), shards, capacity)
    source = assigned.source()
    segments, positions = documents_of(source, documents)
    tokens = ((source[:, None] * 2 + segments) * 100 + positions).astype(np.int32)
    inputs = Inputs(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segments))
    rows = Rows(inputs, jnp.asarray(source))
    filled = fill(LENGTHS, LENGTHS.astype(float), assigned.shard, assigned.slot, shards, capacity, shape)
    return Packed(jax.device_put(rows, where.rows), place_layout(filled, shape, where)), source


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(
    ("shape", "documents"), [*((shape, 1) for shape in SHAPES.values()), (SHAPES["two kinds"], 2)], ids=str
)
def test_packs_hold_every_token_once_and_give_it_back(shape: PackShape, documents: int, shards: int) -> None:
    packed, source = packed_rows(shards, shape, documents)
    S, C = packed.layout.order.shape

    @jax.jit
    def run(packed: Packed) -> PyTree:
        def body(micro: Micro, so_far: PyTree) -> PyTree:
            tokens, numbers, seen = so_far
            inputs, count = micro.inputs, jnp.zeros((S * C * T,), jnp.int32)
            place = jnp.where(micro.token >= 0, micro.token + jnp.arange(S)[:, None] * C * T, S * C * T)
            count = count.at[place.reshape(-1)].add(1, mode="drop")
            # What a model would see: tokens of one document side by side, counted from 0, with a segment of their own.
            wrong = jnp.sum((inputs.tokens % 100 != inputs.positions) & (inputs.segments > 0))
            mixed = (inputs.segments[:, 1:] == inputs.segments[:, :-1]) != (
                inputs.tokens[:, 1:] // 100 == inputs.tokens[:, :-1] // 100
            )
            wrong += jnp.sum(mixed & (inputs.segments[:, 1:] > 0) & (inputs.segments[:, :-1] > 0))
            before = micro.from_before(1.0 * (inputs.tokens + 1))
            tokens = micro.put(before, tokens)
            numbers = micro.put(micro.rows.number.reshape(-1), numbers)
            return tokens, numbers, seen + count + 1000 * wrong

        start = jnp.zeros((S * C, T)), jnp.full(S * C, -1), jnp.zeros((S * C * T,), jnp.int32)
        return fold(packed, body, start)

    tokens, numbers, seen = jax.device_get(run(packed))
    lengths = np.where(source >= 0, LENGTHS[source], 0)
    np.testing.assert_array_equal(seen.reshape(S * C, T), np.arange(T) < lengths[:, None])
    np.testing.assert_array_equal(numbers, np.where(lengths > 0, source, -1))
    segments, positions = documents_of(source, documents)
    before = (source[:, None] * 2 + segments) * 100 + positions  # tokens are one less than what was read there
    np.testing.assert_array_equal(tokens, np.where(positions > 0, before, 0))


def test_derivatives_are_gathers_inside_a_shard() -> None:
    shape = SHAPES["two kinds"]
    packed, source = packed_rows(8, shape)
    where, slots = partition(8), len(source)
    weights = jax.device_put(np.random.default_rng(1).normal(size=(slots, T)).astype(np.float32), where.rows)
    scale = jax.device_put(np.random.default_rng(2).normal(size=(slots, T)).astype(np.float32), where.rows)

    def slopes(packed: Packed, scale: jax.Array, weights: jax.Array) -> jax.Array:
        """The derivative of ``sum(weights_t x_(t-1))`` by x, at the tokens of the rows, through packs."""
        with where.active():

            def body(micro: Micro, so_far: jax.Array) -> jax.Array:
                S = len(micro.slots)
                own = dataclasses.replace(micro, batch=None)

                def total(x: jax.Array) -> jax.Array:
                    wanted = own.from_before(weights_of(x))
                    return jnp.sum(wanted * micro_rows(micro, weights))

                def weights_of(x: jax.Array) -> jax.Array:
                    return x.reshape(S * micro.shape.packs, -1)

                slope = jax.grad(total)(micro.of_tokens(scale))
                rows = own.to_rows(slope, own.at, own.place)
                return own.put(rows, so_far)

            return fold(packed, body, jnp.zeros_like(scale))

    def micro_rows(micro: Micro, x: jax.Array) -> jax.Array:
        return micro.to_rows(micro.of_tokens(x), micro.at, micro.place)

    compiled = jax.jit(slopes).lower(packed, scale, weights).compile()
    text = compiled.as_text() or ""
    assert not re.search(r"all-gather|all-to-all|collective-permute|all-reduce", text)
    assert not re.search(r"= \S+ scatter\(", text)
    got = np.asarray(compiled(packed, scale, weights))
    lengths = np.where(source >= 0, LENGTHS[source], 0)
    after = np.pad(np.asarray(weights)[:, 1:], ((0, 0), (0, 1)))
    np.testing.assert_allclose(got, np.where(np.arange(T) + 1 < lengths[:, None], after, 0), atol=1e-6)
