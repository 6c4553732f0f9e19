"""Parking: arrays that a phase does not need wait in pinned host memory, and come back while other work runs.

Every shard goes to the memory of the host that its device hangs on and comes back to the same device, so a round trip
needs no collective, no compilation and no agreement between processes, and keeps every bit. Both directions are
transfers that the runtime carries out while the device computes; a program that reads a fetched array waits for it,
and nothing else does:

    states["critic"] = park(states["critic"])        # before sampling
    ...                                              # sample
    states["critic"] = fetch(states["critic"])       # returns at once; rewards are computed meanwhile
    values = score(states["critic"].params, rows)    # waits for what is still on its way
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from yatt_jax.errors import InputError
from yatt_jax.parallel.repartition import free
from yatt_jax.types import PyTree

HOST = "pinned_host"


def can_park(device: Any) -> bool:
    """Whether a device can reach pinned host memory."""
    return HOST in _kinds(device)


def is_parked(leaf: jax.Array) -> bool:
    """Whether an array lies in pinned host memory."""
    return leaf.sharding.memory_kind == HOST


def park(tree: PyTree, shared: PyTree = ()) -> PyTree:
    """Moves arrays to pinned host memory and frees them on the devices; does not wait for it.

    Args:
      tree: arrays, such as a ``TrainState`` or a part of one. They are deleted: use what is returned in their place.
      shared: arrays that are still needed on the devices, such as the layout for sampling. What ``tree`` shares with
        it stays where it is.

    Returns:
      The same tree on the host; programs cannot read it before ``fetch``.

    Raises:
      InputError: devices that cannot reach pinned host memory.
    """
    needed = {id(leaf) for leaf in jax.tree.leaves(shared)}
    leaves, treedef = jax.tree.flatten(tree)
    moving = [i for i, leaf in enumerate(leaves) if id(leaf) not in needed and not is_parked(leaf)]
    for device in {d for i in moving for d in leaves[i].sharding.addressable_devices}:
        if not can_park(device):
            raise InputError(
                f"parking: {device} has no {HOST} memory (it has {', '.join(_kinds(device))}); "
                "switch parking off on this backend"
            )
    return jax.tree.unflatten(treedef, _moved(leaves, moving, HOST, keep=False))


def fetch(tree: PyTree, *, keep: bool = False) -> PyTree:
    """Starts to bring parked arrays back to their devices; does not wait for it.

    Args:
      tree: what ``park`` returned. Arrays that are not parked are returned as they are.
      keep: leave the copy on the host, for weights that never change: they are dropped from the devices afterwards
        with ``repartition.release(fetched, parked)``, and need not travel to the host again. Else the copy is freed.

    Returns:
      The same tree on the devices, laid out as it was.
    """
    leaves, treedef = jax.tree.flatten(tree)
    moving = [i for i, leaf in enumerate(leaves) if is_parked(leaf)]
    return jax.tree.unflatten(treedef, _moved(leaves, moving, None, keep=keep))


def _moved(leaves: Sequence[jax.Array], moving: Sequence[int], kind: str | None, *, keep: bool) -> list[jax.Array]:
    """The leaves, those in ``moving`` in another kind of memory (None is the device's own)."""
    shards = [shard for i in moving for shard in leaves[i].addressable_shards]
    where = [SingleDeviceSharding(shard.device, memory_kind=kind or _own(shard.device)) for shard in shards]
    # One call for everything: each shard is a transfer of its own, and calls cost more than small transfers.
    sent = iter(jax.device_put([shard.data for shard in shards], where))
    result = list(leaves)
    for i in moving:
        leaf = leaves[i]
        device = next(iter(leaf.sharding.device_set))
        target = leaf.sharding.with_memory_kind(kind or _own(device))
        parts = [next(sent) for _ in leaf.addressable_shards]
        result[i] = jax.make_array_from_single_device_arrays(leaf.shape, target, parts, dtype=leaf.dtype)
    if not keep:
        # The runtime holds on to buffers until the transfers that read them have ended.
        free([leaves[i] for i in moving])
    return result


def _kinds(device: Any) -> list[str]:
    return [memory.kind for memory in device.addressable_memories()]


def _own(device: Any) -> str:
    return device.default_memory().kind
