"""Shares: disjoint parts of this process's devices that do different things at the same time.

A share is made of whole tensor groups, so that each of them can hold a model in the sampling layout. Shares never span
processes: processes may split their devices differently, and wait for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from yatt_jax.parallel.local import part_of, sampling_group
from yatt_jax.parallel.partition import Partition
from yatt_jax.parallel.repartition import repartition
from yatt_jax.types import PyTree


def make_shares(rollout: Partition, counts: Sequence[int]) -> list[Partition]:
    """Splits this process's devices, in their order.

    Args:
      rollout: the job's sampling partition.
      counts: devices of each share; they need not add up to all.

    Returns:
      A sampling partition for each share, with the job's tensor axes.

    Raises:
      ValueError: a share that is empty or not made of whole tensor groups, more devices than there are, or tensor
        parallelism that spans processes.
    """
    group, tensor = sampling_group(rollout), rollout.split.tensor
    if not group.alone:
        raise ValueError(
            f"parallel.rollout.tensor = {tensor} spans processes {list(group.members)}, whose devices can then not be "
            "shared among roles; choose a tensor axis that fits into a process"
        )
    own = list(group.partition.mesh.devices.flat)
    for count in counts:
        if count < 1 or count % tensor:
            raise ValueError(
                f"a share of {count} devices: with parallel.rollout.tensor = {tensor} it must be a multiple of {tensor}"
            )
    if sum(counts) > len(own):
        raise ValueError(f"shares of {list(counts)} devices are more than the {len(own)} of a process")
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [part_of(rollout, own[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def to_share(tree: PyTree, axes: PyTree, rollout: Partition, share: Partition) -> PyTree:
    """Lays weights out on a share, from wherever they lie on the job's mesh; nothing passes through the host.

    Every leaf is laid out for sampling on all devices, by one program that all processes call together, whatever their
    shares are, and each share keeps its devices' part. The parts of other devices are given back before the next leaf
    moves. A leaf that lies right already shares its buffers: drop what is returned when it is not needed any more, and
    do not ``delete`` it.

    Args:
      tree: arrays on the job's mesh.
      axes: logical axes of each leaf, as in ``Model.axes``.
      rollout: the job's sampling partition.
      share: one of ``make_shares`` of it.
    """

    def move(leaf: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
        return _assemble(_by_device(repartition(leaf, names, rollout)), leaf, names, share)

    return jax.tree.map(move, tree, axes)


def between_shares(tree: PyTree, axes: PyTree, share: Partition) -> PyTree:
    """Weights of one share on another: devices of both keep theirs, new ones get copies from device to device.

    Args:
      tree: arrays in the layout of a share.
      axes: logical axes of each leaf.
      share: where to.
    """

    def move(leaf: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
        held = _by_device(leaf)
        where = share.sharding(names, leaf.shape).devices_indices_map(leaf.shape)
        sources: dict[str, list[jax.Array]] = {}
        for shard in leaf.addressable_shards:
            sources.setdefault(str(shard.index), []).append(shard.data)
        for number, (device, index) in enumerate((d, i) for d, i in where.items() if d not in held):
            copies = sources[str(index)]
            held[device] = jax.device_put(copies[number % len(copies)], SingleDeviceSharding(device))
        return _assemble(held, leaf, names, share)

    return jax.tree.map(move, tree, axes)


def _by_device(leaf: jax.Array) -> dict[Any, jax.Array]:
    return {shard.device: shard.data for shard in leaf.addressable_shards}


def _assemble(
    parts: dict[Any, jax.Array], leaf: jax.Array, names: tuple[str | None, ...], share: Partition
) -> jax.Array:
    where = share.sharding(names, leaf.shape)
    return jax.make_array_from_single_device_arrays(
        leaf.shape, where, [parts[device] for device in share.mesh.devices.flat], dtype=leaf.dtype
    )
