"""Moving a tree of arrays to another partition of the same mesh: device to device, one leaf at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.sharding import Sharding

from yatt_jax.parallel.partition import Partition, shardings
from yatt_jax.types import PyTree


@functools.cache
def _mover(target: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=target)


def repartition(tree: PyTree, axes: PyTree, partition: Partition) -> PyTree:
    """Lays a tree out for a partition.

    Each leaf is a compiled identity with another output sharding, so temporary memory is bounded by one leaf and
    nothing passes through the host. A leaf that already lies right is returned as it is, sharing its buffers.

    Args:
      tree: arrays on the partition's mesh.
      axes: logical axes of each leaf, as in ``Model.axes``.
      partition: where to.
    """
    target = shardings(tree, axes, partition)

    def move(leaf: jax.Array, where: Sharding) -> jax.Array:
        return leaf if leaf.sharding.is_equivalent_to(where, leaf.ndim) else _mover(where)(leaf)

    return jax.tree.map(move, tree, target)


def bytes_per_device(tree: PyTree, target: PyTree) -> int:
    """Bytes that one device holds of a tree under given shardings.

    Args:
      tree: arrays or ``ShapeDtypeStruct``.
      target: the sharding of each leaf.
    """

    def size(leaf: jax.Array, where: Sharding) -> int:
        shard = where.shard_shape(leaf.shape)
        return functools.reduce(lambda a, b: a * b, shard, 1) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, tree, target)))
