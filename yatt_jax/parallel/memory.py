"""How many bytes each role of a job holds on one device: pure arithmetic on shapes, before anything is allocated."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from yatt_jax.parallel.partition import Partition
from yatt_jax.parallel.repartition import bytes_per_device
from yatt_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of a memory table: ``role`` holds ``bytes`` a device for ``what``, in ``phase`` ("always" or a phase)."""

    role: str
    what: str
    bytes: int
    phase: str = "always"


@dataclasses.dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder that decide its activations."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    itemsize: int
    remat: bool


def weights(role: str, abstract: PyTree, target: PyTree, *, trained: bool, moments: int = 2) -> list[Entry]:
    """Parameters of a role and, where it is trained, gradients in float32 and ``moments`` optimizer moments."""
    held = bytes_per_device(abstract, target)
    entries = [Entry(role, "weights", held)]
    if trained:
        entries += [
            Entry(role, "gradients", held, "train"),
            Entry(role, "optimizer moments", moments * held),
            Entry(role, "updated weights and moments before the old are freed", held, "train"),
        ]
    return entries


def cache(shape: DecoderShape, rows: int, slots: int, partition: Partition) -> Entry:
    """Keys and values of ``rows`` rows of ``slots`` tokens while sampling."""
    full = (shape.layers, rows, shape.kv_heads, slots, shape.head_dim)
    local = partition.sharding((None, "rows", "act_kv_heads", None, None), full).shard_shape(full)
    return Entry("actor", "key-value cache", 2 * int(np.prod(local)) * shape.itemsize, "rollout")


def activations(
    role: str, shape: DecoderShape, rows: int, tokens: int, chunk: int, partition: Partition
) -> list[Entry]:
    """What one micro-batch keeps for its backward pass.

    With remat, the input of every layer and the inside of one; without, the inside of all. ``rows`` is per data shard,
    ``chunk`` the tokens whose logits exist at one time.
    """
    tensor = partition.split.tensor
    places = rows * tokens
    inside = places * (
        4 * shape.hidden + (2 * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * shape.mlp) / tensor
    )
    scores = 2 * rows * math.ceil(shape.heads / tensor) * tokens * tokens
    layer = int(inside * shape.itemsize + scores * 4)
    kept = shape.layers * places * shape.hidden * shape.itemsize if shape.remat else shape.layers * layer
    entries = [Entry(role, "activations", int(kept) + layer, "train")]
    if chunk:
        entries.append(
            Entry(role, "logits of a chunk", 3 * min(chunk, places) * math.ceil(shape.vocab / tensor) * 4, "train")
        )
    return entries


def peak(entries: list[Entry]) -> dict[str, int]:
    """Bytes a device holds in each phase, what is always held included."""
    phases = {e.phase for e in entries} - {"always"} or {"always"}
    always = sum(e.bytes for e in entries if e.phase == "always")
    return {p: always + sum(e.bytes for e in entries if e.phase == p and p != "always") for p in sorted(phases)}
