"""The compiled move of one array from one layout to another on the same mesh: which collectives, in how many pieces.

A compiled identity with another output sharding would do, at two costs. Where a move splits further what it also joins
(fsdp 8 to tensor 2, say) the compiler replicates the whole array on every device first. And a TPU program that gathers
holds the result twice, in the order in which it arrives and in the order that is asked for. So the collectives are
spelled out here, and an array of some size is moved in pieces along a dimension that the move does not touch (the
layers of a stack, the rows of a table), by a loop that writes each piece to its place: temporary memory is that of a
piece.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, Sharding

from yatt_jax.parallel.partition import divisors

# Bytes of the new layout on a device that are moved at a time. Small enough to vanish beside weights, large enough for
# the links to be busy: tens of microseconds of starting a collective against a millisecond of sending.
PIECE = 64 * 2**20

Layout = tuple[tuple[str, ...], ...]  # for each dimension the mesh axes that split it, the outermost block first


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a move, on every device's block.

    Attributes:
      kind: "cut" keeps this device's part of a dimension; "gather" joins the parts of a dimension that devices hold;
        "exchange" cuts one dimension and joins another, sending to each device its part.
      axes: mesh axes of the devices concerned.
      dim: the dimension that is cut or, by "gather", joined.
      joined: the dimension that "exchange" joins.
    """

    kind: Literal["cut", "gather", "exchange"]
    axes: tuple[str, ...]
    dim: int
    joined: int = -1


def steps(source: Layout, target: Layout) -> list[Step]:
    """How to get from one layout to another: cuts first, then exchanges, gathers last, so that little is sent.

    Blocks are joined from the innermost mesh axis of a dimension outwards, which leaves each device with one
    contiguous block after every step.
    """
    now, found = [list(axes) for axes in source], list[Step]()

    def wanted(dim: int) -> str | None:
        """The mesh axis by which a dimension must be split next; None where it is not, or has others to lose first."""
        done = len(now[dim])
        grows = done < len(target[dim]) and tuple(now[dim]) == target[dim][:done]
        return target[dim][done] if grows else None

    def surplus(dim: int) -> bool:
        return tuple(now[dim]) != target[dim][: len(now[dim])]

    dims = range(len(now))
    while [tuple(axes) for axes in now] != list(target):
        used = {axis for axes in now for axis in axes}
        cut = next(((dim, axis) for dim in dims if (axis := wanted(dim)) and axis not in used), None)
        if cut:
            found.append(Step("cut", (cut[1],), cut[0]))
            now[cut[0]].append(cut[1])
            continue
        losing = [dim for dim in dims if surplus(dim)]
        swap = next(((dim, to) for dim in losing for to in dims if wanted(to) == now[dim][-1]), None)
        if swap:
            axis = now[swap[0]].pop()
            found.append(Step("exchange", (axis,), swap[1], swap[0]))
            now[swap[1]].append(axis)
            continue
        dim, axis = losing[0], now[losing[0]].pop()
        goes_on = found and found[-1].kind == "gather" and found[-1].dim == dim
        found.append(Step("gather", (axis, *(found.pop().axes if goes_on else ())), dim))
    return found


def take(block: jax.Array, step: Step) -> jax.Array:
    """A device's block after a step; for use inside ``jax.shard_map``."""
    if step.kind == "gather":
        return lax.all_gather(block, step.axes, axis=step.dim, tiled=True)
    (axis,) = step.axes
    count, shape, dim = lax.axis_size(axis), block.shape, step.dim
    if step.kind == "cut":
        size = shape[dim] // count
        return lax.dynamic_slice_in_dim(block, lax.axis_index(axis) * size, size, dim)
    parts = jnp.moveaxis(block.reshape(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]), dim, 0)
    parts = jnp.moveaxis(lax.all_to_all(parts, axis, 0, 0, tiled=True), 0, step.joined)
    shape, dim = parts.shape, step.joined
    return parts.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


@functools.cache
def mover(
    shape: tuple[int, ...], itemsize: int, source: Sharding, target: Sharding, piece: int = PIECE
) -> jax.stages.Wrapped:
    """The jitted function that moves an array of this shape; one for each pair of layouts.

    Args:
      shape: of the array.
      itemsize: bytes of an element.
      source: where it lies.
      target: where it goes, on the same devices.
      piece: bytes of the new layout on a device that are moved at a time.
    """
    plain = jax.jit(lambda x: x, out_shardings=target)
    if not (isinstance(source, NamedSharding) and isinstance(target, NamedSharding) and source.mesh == target.mesh):
        return plain
    plan = steps(_layout(source, len(shape)), _layout(target, len(shape)))
    if all(step.kind == "cut" for step in plan):
        return plain
    size = shard_bytes(shape, itemsize, target)
    block, moved = source.shard_shape(shape), target.shard_shape(shape)
    touched = {dim for step in plan for dim in (step.dim, step.joined)}
    along = next((dim for dim in range(len(shape)) if dim not in touched and block[dim] > 1), None)
    pieces = 1 if along is None else _pieces(block[along], size, piece)

    def run(part: jax.Array) -> jax.Array:
        return functools.reduce(take, plan, part)

    def all_pieces(whole: jax.Array) -> jax.Array:
        if along is None or pieces == 1:
            return run(whole)
        length, dim = block[along] // pieces, along

        def one(number: jax.Array, out: jax.Array) -> jax.Array:
            part = run(lax.dynamic_slice_in_dim(whole, number * length, length, dim))
            return lax.dynamic_update_slice_in_dim(out, part, number * length, dim)

        return lax.fori_loop(0, pieces, one, jnp.zeros(moved, whole.dtype))

    mapped = jax.shard_map(all_pieces, mesh=source.mesh, in_specs=source.spec, out_specs=target.spec, check_vma=False)
    return jax.jit(mapped, out_shardings=target)


def compile_move(
    leaf: jax.ShapeDtypeStruct, source: Sharding, target: Sharding, piece: int = PIECE
) -> jax.stages.Compiled:
    """The program that moves an array, compiled but not run; for its memory and its collectives.

    Args:
      leaf: shape and dtype of the array.
      source: where it lies; its devices need not be there.
      target: where it goes.
      piece: see ``mover``.
    """
    placed = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=source)
    return mover(leaf.shape, leaf.dtype.itemsize, source, target, piece).lower(placed).compile()


@functools.cache
def shard_bytes(shape: tuple[int, ...], itemsize: int, where: Sharding) -> int:
    """Bytes that one device holds of an array."""
    return math.prod(where.shard_shape(shape)) * itemsize


def _pieces(length: int, size: int, piece: int) -> int:
    return next((n for n in divisors(length) if size <= n * piece), length)


def _layout(where: NamedSharding, ndim: int) -> Layout:
    entries: Sequence[str | tuple[str, ...] | None] = [*where.spec, *[None] * (ndim - len(where.spec))]
    # An axis of one device splits nothing.
    named = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
    return tuple(tuple(axis for axis in axes if where.mesh.shape[axis] > 1) for axes in named)
