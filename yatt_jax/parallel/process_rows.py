"""Rows of one process as part of a global array, and back: what is read or written here never leaves the process.

The global array has the layout "devices" of ``parallel.exchange``: its rows are split over all devices in mesh order.
For that the mesh must hold the devices of each process side by side; then the rows of a process are one block of the
array, and ``first_rows`` says where it begins.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from yatt_jax.parallel.exchange import Plan, every_device, exchange, plan_exchange
from yatt_jax.parallel.partition import Partition
from yatt_jax.types import PyTree


def device_share(mesh: Mesh) -> int:
    """Devices of each process.

    Raises:
      ValueError: a mesh in which processes have different numbers of devices, or the devices of one are apart.
    """
    owners = np.array([device.process_index for device in mesh.devices.flat])
    processes = len(set(owners.tolist()))
    share = -(-len(owners) // processes)
    if len(owners) % processes or np.any(owners != np.repeat(owners[::share], share)[: len(owners)]):
        raise ValueError(
            f"the mesh's devices belong to processes {owners.tolist()}; give make_partitions the same number of "
            f"devices of each process, side by side, as sorted(jax.devices(), key=lambda d: (d.process_index, d.id))"
        )
    return share


def first_rows(rows: int, partition: Partition) -> dict[int, int]:
    """The global row where the rows of each process begin.

    Args:
      rows: rows of each process, from ``rows_each``.
      partition: for its devices.
    """
    share = device_share(partition.mesh)
    return {device.process_index: i * rows for i, device in enumerate(partition.mesh.devices.flat[::share])}


def rows_each(most: int, partition: Partition) -> int:
    """Rows that every process makes room for: ``most``, filled up to a multiple of its devices.

    Args:
      most: the largest number of rows of a process, as the processes have agreed.
      partition: for its devices.
    """
    share = device_share(partition.mesh)
    return -(-most // share) * share


def from_process_rows(tree: PyTree, rows: int, partition: Partition) -> PyTree:
    """Makes global arrays of every process's own rows; nothing is sent.

    Args:
      tree: host arrays ``[n, ...]`` with the rows of this process, n <= rows, the same on no other process. Every
        process gives the same tree with the same dtypes and the same sizes after the first. None stays None.
      rows: rows of each process in the result, from ``rows_each``; those beyond n are zeros.
      partition: for its devices.

    Returns:
      Arrays ``[processes * rows, ...]`` split over all devices.

    Raises:
      ValueError: more rows than ``rows``, or ``rows`` that the process's devices do not divide.
    """
    share = device_share(partition.mesh)
    if rows % share:
        raise ValueError(f"{rows} rows do not divide over the {share} devices of a process; use rows_each")
    sharding = every_device(partition.mesh)
    first = first_rows(rows, partition)[jax.process_index()]
    total = partition.mesh.size // share * rows

    def spread(x: np.ndarray) -> jax.Array:
        x = np.asarray(x)
        if len(x) > rows:
            raise ValueError(f"{len(x)} rows of this process, and room for {rows}; agree on the largest number first")
        filled = np.zeros((rows, *x.shape[1:]), x.dtype)
        filled[: len(x)] = x

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            begin, end, _ = index[0].indices(total)
            return filled[begin - first : end - first]

        return jax.make_array_from_callback((total, *x.shape[1:]), sharding, part)

    return jax.tree.map(spread, tree)


def to_process_rows(tree: PyTree, partition: Partition) -> PyTree:
    """The rows of this process as host arrays ``[rows, ...]``, read from its own devices.

    Args:
      tree: arrays split over all devices, as ``from_process_rows`` makes them.
      partition: for its devices.

    Raises:
      ValueError: an array that lies otherwise.
    """
    share = device_share(partition.mesh)
    sharding = every_device(partition.mesh)

    def read(x: jax.Array) -> np.ndarray:
        if not x.sharding.is_equivalent_to(sharding, x.ndim):
            raise ValueError(f"{x.dtype}{list(x.shape)} lies as {x.sharding}, not split over all devices; exchange it")
        parts = {shard.device: shard.data for shard in x.addressable_shards}
        mine = _first_device(partition.mesh)
        return np.concatenate([np.asarray(parts[d]) for d in partition.mesh.devices.flat[mine : mine + share]])

    return jax.tree.map(read, tree)


def plan_own(source: Int[np.ndarray, "S"], rows: int, partition: Partition, like: Plan | None = None) -> Plan:
    """The exchange that brings results of exchanged rows back to the processes whose rows they are.

    Args:
      source: row of each slot, or -1, as given to ``plan_exchange``; the last slot of a row counts.
      rows: rows of each process, at least 1, as given to ``from_process_rows``.
      partition: the partition of the exchange.
      like: an earlier plan, see ``plan_exchange``.
    """
    total = partition.mesh.size // device_share(partition.mesh) * rows
    source = np.asarray(source, np.int64)
    slots = np.full(total, -1, np.int64)
    filled = np.flatnonzero(source >= 0)
    slots[source[filled]] = filled
    return plan_exchange(slots, len(source), partition, layout="rows", target="devices", like=like)


def own_values(tree: PyTree, plan: Plan, partition: Partition, missing: PyTree | None = None) -> PyTree:
    """Results of this process's rows, in those rows' order: host arrays ``[rows, ...]``.

    Args:
      tree: small arrays ``[S, ...]`` with a result for each slot, split over the data shards (``partition.rows``).
      plan: from ``plan_own``.
      partition: the partition of the exchange.
      missing: the same tree with the number that rows without a slot get; 0 everywhere by default.
    """
    return to_process_rows(exchange(tree, plan, missing), partition)


def _first_device(mesh: Mesh) -> int:
    """Place of this process's first device in the mesh."""
    return next(i for i, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index())
