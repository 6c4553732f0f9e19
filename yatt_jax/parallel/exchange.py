"""Moving rows between devices by a plan that every process knows: balancing, and bringing results back.

A batch of global arrays ``[rows, ...]`` lies in one of two layouts: "devices", its rows split over all devices in mesh
order, as sampled rows are; or "rows", split over the data shards and the same on all devices of a tensor group, as
training wants them. A plan names the row that lands in each slot of the result.

Only rows that change their device are sent, by all-to-all exchanges whose block ``c`` is the largest number of rows
that any device sends to one other, rounded up to a power of two so that few programs compile. One exchange among D
devices holds D blocks, most of them empty when shards hold few rows. So the plan also considers sending in stages over
the digits of the device number (first to a device with the right first digit, and so on), which hold ``radix`` blocks
each, and takes what needs the smaller buffers. Nothing to send is no exchange at all.

Replication over a tensor group of t devices comes last: each of them receives a t-th of the group's new rows (those
that it holds already, as far as they fit), and one all-gather inside the group copies them. The batch is never
gathered over the data shards.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from yatt_jax.parallel.partition import Partition
from yatt_jax.parallel.route import Route, factor, find_places, find_route
from yatt_jax.types import PyTree

Layout = Literal["devices", "rows"]
Exchange = Callable[[tuple[jax.Array, ...], tuple[np.ndarray, ...], jax.Array], tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What is fixed when an exchange is compiled; plans with equal shapes share a program.

    Attributes:
      mesh: the devices.
      source: where the rows lie before.
      target: where they lie after.
      shared: for source and target, whether every device of a tensor group holds the rows of the group.
      rows: rows of one part of the source (of a device, or of a data shard).
      slots: rows of one part of the target.
      digits: factors of the device count: stages over the data shards, then the tensor group.
      blocks: rows of a block in the stage over each digit; 0 leaves the stage out.
      gathered: rows that each device gives to its tensor group.
    """

    mesh: Mesh
    source: NamedSharding
    target: NamedSharding
    shared: tuple[bool, bool]
    rows: int
    slots: int
    digits: tuple[int, ...]
    blocks: tuple[int, ...]
    gathered: int

    @property
    def buffer(self) -> int:
        """Rows of all buffers of a device, beside source and target."""
        stages = sum(g * c for g, c in zip(self.digits, self.blocks, strict=True))
        return stages + self.gathered * self.digits[-1]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which rows go where.

    Attributes:
      shapes: what is compiled.
      index: tables of every device, int32 ``[devices, *]``: for each stage the row sent in each place of each block,
        then the rows given to the tensor group, then the row of each slot (-1 for none).
      moved: rows that are sent to another device.
    """

    shapes: Shapes
    index: Int[np.ndarray, "devices width"]
    moved: int


def every_device(mesh: Mesh) -> NamedSharding:
    """The layout "devices": rows split over all devices, in mesh order."""
    return NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))


def layout_sharding(partition: Partition, layout: Layout) -> NamedSharding:
    """The sharding of an array ``[rows, ...]`` in a layout."""
    return every_device(partition.mesh) if layout == "devices" else partition.rows


def home_shards(rows: int, partition: Partition, layout: Layout = "devices") -> Int[np.ndarray, "rows"]:
    """The data shard where each row of an array of ``rows`` rows lies: the ``home`` that ``balance`` asks for."""
    return np.arange(rows) // (_rows_each(rows, partition, layout, "rows") * _devices_each(partition, layout))


def plan_exchange(
    source: Int[np.ndarray, "S"],
    rows: int,
    partition: Partition,
    *,
    layout: Layout = "devices",
    target: Layout = "rows",
    radix: int = 8,
    like: Plan | None = None,
) -> Plan:
    """Works out an exchange; the same on every process, from the same arguments.

    Args:
      source: for each slot of the result the row of the array that lands there, or -1 for none. A row may land in
        several slots or in none.
      rows: rows of the array, empty ones included.
      partition: whose data shards take part; its tensor axes must be the innermost.
      layout: where rows lie.
      target: where slots lie.
      radix: largest number of devices that one stage of a staged exchange spans.
      like: an earlier plan; its block sizes are kept where they suffice, so that nothing new compiles.

    Raises:
      ValueError: rows or slots that their layout does not divide, or a source row that does not exist.
    """
    source = np.asarray(source, np.int64)
    _check(source, rows, partition)
    shards = partition.row_shards
    tensor = partition.mesh.size // shards
    before = like.shapes if like else None
    fixed = Shapes(
        mesh=partition.mesh,
        source=layout_sharding(partition, layout),
        target=layout_sharding(partition, target),
        shared=(layout == "rows" and tensor > 1, target == "rows" and tensor > 1),
        rows=_rows_each(rows, partition, layout, "rows"),
        slots=_rows_each(len(source), partition, target, "slots"),
        digits=(),
        blocks=(),
        gathered=0,
    )
    places = find_places(source, fixed.rows, fixed.slots, partition.mesh.size, tensor, fixed.shared)
    sent = places.sent
    made: list[tuple[Shapes, Route]] = []
    for digits in dict.fromkeys([(shards, tensor), (*factor(shards, radix), tensor)]):
        empty = dataclasses.replace(fixed, digits=digits, blocks=(0,) * len(digits))
        least = before if before and _alike(before, empty) else empty
        route = find_route(places.sender[sent], places.row[sent], places.device[sent], digits, least.blocks)
        gathered = max(places.gathered, least.gathered)
        made.append((dataclasses.replace(empty, blocks=route.blocks, gathered=gathered), route))
    shapes, route = min(made, key=lambda one: (one[0] != before, one[0].buffer))
    index = np.concatenate([*route.tables, *places.tables(route.position, shapes.gathered)], axis=1)
    return Plan(shapes, index.astype(np.int32), int(np.count_nonzero(sent)))


def _alike(one: Shapes, other: Shapes) -> bool:
    """Whether two exchanges differ at most in the sizes of their buffers."""
    return dataclasses.replace(one, blocks=other.blocks, gathered=other.gathered) == other


def exchange(tree: PyTree, plan: Plan, fill: PyTree | None = None) -> PyTree:
    """Moves the rows of every array of a tree; device to device, each device holding little beside its own rows.

    Args:
      tree: arrays ``[rows, ...]`` that lie as the plan's source; None in the place of an array stays None.
      plan: from ``plan_exchange``.
      fill: the same tree with the number that empty slots of each array hold; 0 everywhere by default.

    Returns:
      The tree of arrays ``[slots, ...]`` that lie as the plan's target.

    Raises:
      ValueError: an array with another number of rows than the plan's, or one that does not lie as the plan says.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    shapes = plan.shapes
    rows = shapes.rows * _parts(shapes.source)
    for leaf in leaves:
        if leaf.shape[0] != rows or not leaf.sharding.is_equivalent_to(shapes.source, leaf.ndim):
            raise ValueError(
                f"the plan exchanges {rows} rows that lie as {shapes.source.spec}; this array is "
                f"{leaf.dtype}{list(leaf.shape)} and lies as {leaf.sharding}; place it with from_process_rows or "
                f"jax.device_put"
            )
    numbers = [0] * len(leaves) if fill is None else structure.flatten_up_to(fill)
    fills = tuple(np.asarray(number, leaf.dtype) for number, leaf in zip(numbers, leaves, strict=True))
    return structure.unflatten(program(shapes)(tuple(leaves), fills, place_index(plan)))


def place_index(plan: Plan) -> jax.Array:
    """The plan's tables on their devices."""
    where = every_device(plan.shapes.mesh)
    return jax.make_array_from_callback(plan.index.shape, where, lambda index: plan.index[index])


@functools.cache
def program(shapes: Shapes) -> Exchange:
    """The jitted exchange: ``(leaves, fills, index) -> leaves``; compiles once for each set of leaf shapes."""
    names = tuple(f"digit{i}" for i in range(len(shapes.digits)))
    # The same devices in the same order, with axes that the stages can name.
    mesh = Mesh(np.reshape(shapes.mesh.devices, shapes.digits), names)
    split, shared = PartitionSpec(names), PartitionSpec(names[:-1])

    def local(leaves: tuple[jax.Array, ...], fills: tuple[jax.Array, ...], index: jax.Array) -> tuple[jax.Array, ...]:
        tables = _unpack(shapes, index[0])
        return tuple(_move(shapes, names, leaf, value, tables) for leaf, value in zip(leaves, fills, strict=True))

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(shared if shapes.shared[0] else split, PartitionSpec(), split),
        out_specs=shared if shapes.shared[1] else split,
        check_vma=False,  # that the devices of a tensor group end with equal rows is what the tables say
    )
    return jax.jit(mapped, out_shardings=shapes.target)


@dataclasses.dataclass(frozen=True)
class _Tables:
    """One device's part of ``Plan.index``."""

    stages: tuple[jax.Array | None, ...]
    given: jax.Array
    slots: jax.Array


def _unpack(shapes: Shapes, index: jax.Array) -> _Tables:
    sizes = [g * c for g, c in zip(shapes.digits, shapes.blocks, strict=True)] + [shapes.gathered, shapes.slots]
    *stages, given, slots = jnp.split(index, np.cumsum(sizes)[:-1])
    kept = tuple(stage if c else None for stage, c in zip(stages, shapes.blocks, strict=True))
    return _Tables(kept, given, slots)


def _move(shapes: Shapes, names: tuple[str, ...], leaf: jax.Array, fill: jax.Array, tables: _Tables) -> jax.Array:
    """Exchanges one array inside ``shard_map``."""
    if leaf.dtype == bool:  # collectives of some platforms know no booleans
        return _move(shapes, names, leaf.astype(jnp.uint8), fill.astype(jnp.uint8), tables).astype(bool)
    empty = (tables.slots < 0).reshape(-1, *[1] * (leaf.ndim - 1))
    if not shapes.rows:
        return jnp.broadcast_to(fill, (shapes.slots, *leaf.shape[1:]))
    buffer = None
    for name, size, block, table in zip(names, shapes.digits, shapes.blocks, tables.stages, strict=True):
        if table is not None:
            sent = jnp.take(leaf if buffer is None else buffer, table, axis=0, mode="clip")
            sent = sent.reshape(size, block, *leaf.shape[1:])
            buffer = jax.lax.all_to_all(sent, name, 0, 0).reshape(size * block, *leaf.shape[1:])
    if shapes.shared[1]:
        if shapes.gathered:
            given = _pick(None if shapes.shared[0] else leaf, buffer, tables.given, shapes.rows)
            buffer = jax.lax.all_gather(given, names[-1], axis=0, tiled=True)
        near = leaf if shapes.shared[0] else None
    else:
        near = leaf
    return jnp.where(empty, fill, _pick(near, buffer, tables.slots, shapes.rows))


def _pick(near: jax.Array | None, far: jax.Array | None, index: jax.Array, limit: int) -> jax.Array:
    """Rows of ``near`` by indices below ``limit``, of ``far`` by those from there on; None is never asked for."""
    if far is None:
        assert near is not None
        return jnp.take(near, index, axis=0, mode="clip")
    received = jnp.take(far, index - limit, axis=0, mode="clip")
    if near is None:
        return received
    ours = (index < limit).reshape(-1, *[1] * (near.ndim - 1))
    return jnp.where(ours, jnp.take(near, index, axis=0, mode="clip"), received)


def _parts(sharding: NamedSharding) -> int:
    """Number of parts that the rows of a sharding are split into."""
    axes = sharding.spec[0] if len(sharding.spec) else None
    axes = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return int(np.prod([sharding.mesh.shape[axis] for axis in axes], dtype=np.int64))


def _devices_each(partition: Partition, layout: Layout) -> int:
    """Parts of a layout in one data shard."""
    return partition.mesh.size // partition.row_shards if layout == "devices" else 1


def _rows_each(rows: int, partition: Partition, layout: Layout, what: str) -> int:
    parts = partition.row_shards * _devices_each(partition, layout)
    if rows % parts:
        over = "devices" if layout == "devices" else "data shards"
        raise ValueError(f"{rows} {what} do not divide over {parts} {over}; fill up to {-(-rows // parts) * parts}")
    return rows // parts


def _check(source: np.ndarray, rows: int, partition: Partition) -> None:
    axes = tuple(a for a in partition.mesh.axis_names if partition.mesh.shape[a] > 1)
    used = tuple(a for a in partition.rules["rows"] if partition.mesh.shape[a] > 1)
    if axes[: len(used)] != used:
        raise ValueError(f"rows lie over mesh axes {used} of {axes}, and must lie over the outermost")
    if source.ndim != 1 or not len(source) or source.min() < -1 or source.max() >= rows:
        raise ValueError(f"source names a row 0 ... {rows - 1} or -1 for each slot, of which there is at least one")
