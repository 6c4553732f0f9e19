"""Moving a tree of arrays to another partition of the same mesh: device to device, one leaf at a time."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Sharding

from yatt_jax.parallel.moves import mover, shard_bytes
from yatt_jax.parallel.partition import Partition, shardings
from yatt_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Moved:
    """What a re-partition did; counts are of this process's devices alone.

    Attributes:
      leaves: arrays that were laid out anew.
      shared: arrays that lay right already, whose buffers both layouts share.
      received: bytes of the new layout that were not on their device before; those of all devices added up.
      copied: bytes of the new layout that were on their device before.
      peak: bytes in use on the fullest device at worst: as the backend has counted since the process began where it
        keeps count, and else the most that the move itself can need (both layouts, and the largest new array of a
        device once more).
      measured: whether ``peak`` was counted by the backend.
      seconds: wall time, from all inputs ready to all outputs ready; None where it was not waited for.
    """

    leaves: int
    shared: int
    received: int
    copied: int
    peak: int
    measured: bool
    seconds: float | None = None


def repartition(tree: PyTree, axes: PyTree, partition: Partition) -> PyTree:
    """Lays a tree out for a partition.

    Each leaf is moved by a program of its own, from device to device: nothing passes through the host, and temporary
    memory is that of a piece of one leaf (``moves.PIECE``) where the leaf has a dimension to be cut along, and else at
    most twice the leaf's new block. A leaf that already lies right is returned as it is, sharing its buffers.

    Args:
      tree: arrays on the partition's mesh.
      axes: logical axes of each leaf, as in ``Model.axes``.
      partition: where to.
    """
    target = shardings(tree, axes, partition)

    def move(leaf: jax.Array, where: Sharding) -> jax.Array:
        if leaf.sharding.is_equivalent_to(where, leaf.ndim):
            return leaf
        return mover(leaf.shape, leaf.dtype.itemsize, leaf.sharding, where)(leaf)

    return jax.tree.map(move, tree, target)


def measured(tree: PyTree, axes: PyTree, partition: Partition, *, wait: bool = False) -> tuple[PyTree, Moved]:
    """``repartition``, with figures of the move.

    Args:
      tree: arrays on the partition's mesh.
      axes: logical axes of each leaf.
      partition: where to.
      wait: wait for the inputs and then for the outputs, to time the move alone.
    """
    if wait:
        jax.block_until_ready(tree)
    begun = time.perf_counter()
    laid_out = repartition(tree, axes, partition)
    seconds = None
    if wait:
        jax.block_until_ready(laid_out)
        seconds = time.perf_counter() - begun
    return laid_out, dataclasses.replace(compare(tree, laid_out), seconds=seconds)


def compare(tree: PyTree, laid_out: PyTree) -> Moved:
    """Figures of a move that has been made, from where the arrays of both layouts lie; reads no array.

    Args:
      tree: arrays before; they may have been freed since.
      laid_out: what ``repartition`` returned for them.
    """
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(laid_out), strict=True))
    moved = [(old, new) for old, new in pairs if old is not new]
    traffic = [traffic_of(new.shape, new.dtype.itemsize, old.sharding, new.sharding) for old, new in moved]
    new_sizes = [shard_bytes(new.shape, new.dtype.itemsize, new.sharding) for _, new in moved]
    held = sum(shard_bytes(old.shape, old.dtype.itemsize, old.sharding) for old, _ in pairs)
    counted = [_peak(device) for device in (pairs[0][0].sharding.addressable_devices if pairs else ())]
    known = [count for count in counted if count is not None]
    return Moved(
        leaves=len(moved),
        shared=len(pairs) - len(moved),
        received=sum(received for received, _ in traffic),
        copied=sum(copied for _, copied in traffic),
        peak=max(known, default=held + sum(new_sizes) + max(new_sizes, default=0)),
        measured=bool(known),
    )


def release(laid_out: PyTree, source: PyTree) -> None:
    """Frees a layout at once, save what it shares with the tree it was made of.

    Work that is under way keeps its buffers until it has ended. Arrays that were freed or donated before are skipped.

    Args:
      laid_out: what ``repartition`` returned, or another tree whose arrays are those of ``source`` or its own. Not a
        view whose arrays share buffers under another identity.
      source: the tree whose arrays stay.
    """
    kept = {id(leaf) for leaf in jax.tree.leaves(source)}
    free(leaf for leaf in jax.tree.leaves(laid_out) if id(leaf) not in kept)


def free(leaves: Iterable[jax.Array]) -> None:
    """Gives the buffers of arrays back at once; arrays without buffers are skipped."""
    for leaf in leaves:
        if not leaf.is_deleted():
            leaf.delete()


class SecondLayout:
    """A second layout of weights that change: made when it is asked for, and freed or kept afterwards.

    A new layout never exists beside an old one: that one's buffers are freed first. (Donating them to the move, or the
    weights themselves, would spare nothing: a buffer can only be reused for one of the same size on each device.)

    Args:
      axes: logical axes of each leaf.
      partition: the second layout.
      keep: hold the layout between uses, so that weights which have not changed are not moved again; else ``done``
        frees it, so that its memory serves the update.

    Attributes:
      moved: figures of the last move; None before the first.
    """

    def __init__(self, axes: PyTree, partition: Partition, *, keep: bool):
        self.moved: Moved | None = None
        self._axes, self._partition, self._keep = axes, partition, keep
        self._source: PyTree = None
        self._made: PyTree = None

    def of(self, params: PyTree, *, wait: bool = False) -> PyTree:
        """The layout of ``params``; moves nothing if it is held for exactly these arrays.

        Args:
          params: arrays in their first layout.
          wait: time the move; see ``measured``.
        """
        held = jax.tree.leaves(self._source)
        leaves = jax.tree.leaves(params)
        if len(held) == len(leaves) and all(a is b for a, b in zip(held, leaves, strict=True)):
            return self._made
        self.free()
        self._made, self.moved = measured(params, self._axes, self._partition, wait=wait)
        self._source = params
        return self._made

    def done(self) -> None:
        """The layout is not read any more, until it is asked for again."""
        if not self._keep:
            self.free()

    def free(self) -> None:
        """Frees the layout's own buffers, whatever ``keep`` says."""
        release(self._made, self._source)
        self._made = self._source = None


@functools.cache
def traffic_of(shape: tuple[int, ...], itemsize: int, source: Sharding, target: Sharding) -> tuple[int, int]:
    """Bytes of an array's new shards on this process's devices: (from other devices, from the device itself).

    Args:
      shape: of the array.
      itemsize: bytes of an element.
      source: where it lies.
      target: where it goes, on the same devices.
    """
    before = source.addressable_devices_indices_map(shape)
    received = copied = 0
    for device, new in target.addressable_devices_indices_map(shape).items():
        old = before[device]
        assert old is not None
        assert new is not None
        both = [(_bounds(a, size), _bounds(b, size)) for a, b, size in zip(old, new, shape, strict=True)]
        there = math.prod(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in both)
        copied += there * itemsize
        received += (math.prod(b[1] - b[0] for _, b in both) - there) * itemsize
    return received, copied


def _bounds(index: slice, size: int) -> tuple[int, int]:
    low, high, _ = index.indices(size)
    return low, high


def bytes_per_device(tree: PyTree, target: PyTree) -> int:
    """Bytes that one device holds of a tree under given shardings.

    Args:
      tree: arrays or ``ShapeDtypeStruct``.
      target: the sharding of each leaf.
    """
    sizes = jax.tree.map(lambda leaf, where: shard_bytes(leaf.shape, leaf.dtype.itemsize, where), tree, target)
    return sum(jax.tree.leaves(sizes))


def _peak(device: Any) -> int | None:
    stats = device.memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None
