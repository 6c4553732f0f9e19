"""The part of the mesh on which this process samples.

Sampling needs no other process when tensor parallelism fits into one: then each process samples on its own devices, in
lockstep with nobody. Where tensor parallelism spans processes, those that share it form a group and sample together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from yatt_jax.parallel.exchange import every_device
from yatt_jax.parallel.partition import Partition
from yatt_jax.types import PyTree


def job_devices() -> list[Any]:
    """All devices of the job, those of a process side by side."""
    return sorted(jax.devices(), key=lambda d: (getattr(d, "slice_index", 0) or 0, d.process_index, d.id))


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes that sample together with this one.

    Attributes:
      members: their numbers, ascending; this one alone where tensor parallelism fits into a process.
      partition: the sampling partition of their devices.
    """

    members: tuple[int, ...]
    partition: Partition

    @property
    def alone(self) -> bool:
        """Whether this process samples by itself."""
        return len(self.members) == 1

    @property
    def rank(self) -> int:
        """The place of this process among the members."""
        return self.members.index(jax.process_index())

    def take(self, tree: PyTree, axes: PyTree) -> PyTree:
        """The group's part of a tree that lies in the job's sampling partition; shares its buffers.

        Args:
          tree: arrays over all of the job's devices.
          axes: logical axes of each leaf.
        """

        def part(leaf: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
            where = self.partition.sharding(names, leaf.shape)
            if leaf.sharding == where:
                return leaf
            return jax.make_array_from_single_device_arrays(
                leaf.shape, where, [shard.data for shard in leaf.addressable_shards]
            )

        return jax.tree.map(part, tree, axes)

    def put(self, rows: np.ndarray) -> Any:
        """This process's rows as an argument of a program over the group's devices: all members' rows in their order.

        Args:
          rows: the same number in every process, a multiple of its devices where there are several.
        """
        if self.alone:
            return rows
        shape = (len(self.members) * len(rows), *rows.shape[1:])
        return jax.make_array_from_process_local_data(every_device(self.partition.mesh), rows, shape)

    def getter(self) -> Callable[[PyTree], PyTree]:
        """The inverse of ``put`` for results: a function that every member must call at the same time."""
        if self.alone:
            return lambda tree: jax.tree.map(np.asarray, tree)
        spread = jax.jit(lambda tree: tree, out_shardings=every_device(self.partition.mesh))
        return lambda tree: jax.tree.map(_own_rows, spread(tree))


def _own_rows(x: jax.Array) -> np.ndarray:
    shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


def sampling_group(rollout: Partition) -> Group:
    """The group of this process.

    Args:
      rollout: the job's sampling partition.

    Raises:
      ValueError: a tensor axis that neither divides a process's devices nor is a multiple of them.
    """
    devices = list(rollout.mesh.devices.flat)
    order = list(dict.fromkeys(d.process_index for d in devices))
    own, tensor = len(devices) // len(order), rollout.split.tensor
    if len(order) == 1:
        return Group((order[0],), rollout)
    counts = {p: sum(d.process_index == p for d in devices) for p in order}
    if len(set(counts.values())) > 1:
        raise ValueError(f"processes have different numbers of devices: {counts}; every process needs as many")
    if own % tensor and tensor % own:
        raise ValueError(
            f"parallel.rollout.tensor = {tensor} and the {own} devices of a process: one must divide the other"
        )
    size = max(1, tensor // own)
    first = order.index(jax.process_index()) // size * size
    members = order[first : first + size]
    inside = [d for d in devices if d.process_index in members]
    return Group(tuple(members), part_of(rollout, inside))


def part_of(rollout: Partition, devices: list[Any]) -> Partition:
    """The sampling partition of some of its devices, with the same tensor axes, so that shards are the same.

    Args:
      rollout: the job's sampling partition.
      devices: whole tensor groups of it, in its order.
    """
    tensor, count = rollout.split.tensor, len(devices)
    edges = [1]
    for name in reversed(rollout.mesh.axis_names):
        edges.append(edges[-1] * rollout.mesh.shape[name])
    inner = [edge for edge in edges if edge <= tensor]
    edges = inner if count == tensor else [*inner, count]
    spans = list(itertools.pairwise(edges))[::-1] or [(1, 1)]
    names = [f"m{low}_{high}" for low, high in spans]
    mesh = Mesh(np.asarray(devices).reshape([high // low for low, high in spans]), names)
    data = (f"m{tensor}_{count}",) if count > tensor else ()
    known = set(names)

    def here(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in known and axis not in data)

    rules = {logical: here(axes) for logical, axes in rollout.rules.items()} | {"rows": data}
    return Partition(rollout.name, mesh, rules, dataclasses.replace(rollout.split, data=count // tensor))
