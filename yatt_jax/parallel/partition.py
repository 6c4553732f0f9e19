"""One device mesh, and partitions of it: rule tables from logical axis names to mesh axes.

Training splits the devices as ``data x fsdp x tensor``, sampling as ``data x tensor``. Both are the same devices in
the same order, so the mesh is factored at every boundary of either split, and a partition is only a table: logical
axis -> tuple of mesh axes. Moving parameters between partitions is then a change of sharding on one mesh.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from yatt_jax.types import PyTree

LogicalAxes = tuple[str | None, ...]

# Which role of a split (data, fsdp, tensor) carries each logical axis.
PARAMETER_ROLES: Mapping[str, tuple[str, ...]] = {
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}
ACTIVATION_ROLES: Mapping[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "act_heads": ("tensor",),
    "act_kv_heads": ("tensor",),
    "act_mlp": ("tensor",),
    "act_vocab": ("tensor",),
}
ROLES: Mapping[str, tuple[str, ...]] = {**PARAMETER_ROLES, **ACTIVATION_ROLES}


@dataclasses.dataclass(frozen=True)
class Split:
    """Sizes of the axes a partition divides the devices into; -1 is inferred from the device count (one at most)."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def resolve(self, devices: int, name: str) -> Split:
        """Fills in -1.

        Raises:
          ValueError: sizes that do not multiply to ``devices``; the message names the axis and what would fit.
        """
        sizes = dataclasses.asdict(self)
        for axis, size in sizes.items():
            if size != -1 and size < 1:
                raise ValueError(f"{name}.{axis} = {size}: a size is a positive number, or -1 to infer it")
        unknown = [axis for axis, size in sizes.items() if size == -1]
        if len(unknown) > 1:
            raise ValueError(f"{name}: only one axis can be -1, and {', '.join(unknown)} are")
        known = math.prod(size for size in sizes.values() if size != -1)
        if unknown:
            if devices % known:
                raise ValueError(
                    f"{name}: the given sizes multiply to {known}, which does not divide {devices} devices; "
                    f"sizes whose product is one of {divisors(devices)} would"
                )
            sizes[unknown[0]] = devices // known
        elif known != devices:
            raise ValueError(
                f"{name}: {' x '.join(f'{a} {s}' for a, s in sizes.items())} = {known} devices, "
                f"and there are {devices}; "
                f"set one axis to -1 to infer it"
            )
        return Split(**sizes)


@dataclasses.dataclass(frozen=True)
class Partition:
    """A mesh with a rule table.

    Attributes:
      name: "train" or "rollout", for messages.
      mesh: the job's one mesh.
      rules: logical axis -> mesh axes.
      split: the sizes the rules come from.
    """

    name: str
    mesh: Mesh
    rules: Mapping[str, tuple[str, ...]]
    split: Split

    def spec(self, axes: LogicalAxes, shape: Sequence[int]) -> PartitionSpec:
        """The partition spec of an array.

        A dimension that its mesh axes do not divide uses the outermost ones that do and is replicated over the rest:
        so fewer key-value heads than the tensor axis lie where their query heads are. What must divide is checked by
        the plan, before a run.

        Args:
          axes: logical name of each dimension, None for one that is never split.
          shape: sizes of the dimensions.
        """
        used: set[str] = set()
        entries: list[tuple[str, ...] | None] = []
        for name, size in zip(axes, shape, strict=True):
            mesh_axes = self.rules.get(name, ()) if name else ()
            mesh_axes = tuple(a for a in mesh_axes if a not in used and self.mesh.shape[a] > 1)
            while mesh_axes and size % math.prod(self.mesh.shape[a] for a in mesh_axes):
                mesh_axes = mesh_axes[:-1]
            used.update(mesh_axes)
            entries.append(mesh_axes or None)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def sharding(self, axes: LogicalAxes, shape: Sequence[int]) -> NamedSharding:
        """The sharding of an array with these logical axes and sizes."""
        return NamedSharding(self.mesh, self.spec(axes, shape))

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of arrays that every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """Sharding of arrays whose first dimension is rows."""
        return NamedSharding(self.mesh, PartitionSpec(self.rules["rows"] or None))

    @property
    def row_shards(self) -> int:
        """Number of parts that the rows are split into."""
        return math.prod(self.mesh.shape[a] for a in self.rules["rows"])

    @property
    def device(self) -> Any:
        """One of the devices; all are of a kind. It need not be there: programs are compiled for described ones too."""
        return self.mesh.devices.flat[0]

    @contextlib.contextmanager
    def active(self) -> Iterator[Partition]:
        """Makes ``constrain`` inside the block (that is, while tracing) follow this partition."""
        token = _ACTIVE.set(self)
        try:
            yield self
        finally:
            _ACTIVE.reset(token)


_ACTIVE: contextvars.ContextVar[Partition | None] = contextvars.ContextVar("partition", default=None)


def active_partition() -> Partition | None:
    """The partition that the program being traced is for, or None where none is active."""
    return _ACTIVE.get()


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation to its place in the active partition; the identity where none is active."""
    partition = _ACTIVE.get()
    if partition is None or partition.mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition.sharding(axes, x.shape))


def divisors(n: int) -> list[int]:
    """All divisors of ``n``, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def make_partitions(
    train: Split, rollout: Split, devices: Sequence[Any] | None = None, *, kv_heads: Collection[int] = ()
) -> tuple[Partition, Partition]:
    """Builds the mesh and its two partitions.

    The tensor axis is innermost in both, so that parameters keep it on the same dimension when they move. Where one
    partition splits a dimension further than the other, its blocks lie inside the other's on the same devices: the
    innermost mesh axis of a tensor axis counts most.

    Args:
      train: sizes for training.
      rollout: sizes for sampling; its fsdp must be 1.
      devices: the devices in order; all of the job's by default.
      kv_heads: numbers of key-value heads of the models. Where a tensor axis has more devices than heads, the mesh is
        factored there too, so that each device holds its own head and not all of them.

    Returns:
      The training partition and the sampling partition, over one mesh.

    Raises:
      ValueError: sizes that do not fit the devices, or splits with no common refinement.
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    train = train.resolve(count, "parallel.train")
    rollout = rollout.resolve(count, "parallel.rollout")
    if rollout.fsdp != 1:
        raise ValueError("parallel.rollout has no fsdp axis: sampling reads whole weights; use data and tensor")
    edges = sorted({1, train.tensor, train.tensor * train.fsdp, rollout.tensor, count})
    if not _chain(edges):
        low, high = next((a, b) for a, b in itertools.pairwise(edges) if b % a)
        works = [d for d in divisors(count) if _chain([1, train.tensor, train.tensor * train.fsdp, d, count])]
        raise ValueError(
            f"parallel.rollout.tensor = {rollout.tensor} and parallel.train "
            f"(fsdp {train.fsdp}, tensor {train.tensor}) have no common refinement: {high} is not a multiple of "
            f"{low}; a rollout.tensor among {works} works"
        )
    for size in sorted({math.gcd(heads, split.tensor) for heads in kv_heads for split in (train, rollout)}):
        edges = sorted({*edges, size}) if _chain([*edges, size]) else edges
    # Axis names say how many devices lie inside: a span of m1..m4 strides over 1 device, 4 apart at its end.
    spans = list(itertools.pairwise(edges))[::-1] or [(1, 1)]
    names = [f"m{low}_{high}" for low, high in spans]
    mesh = Mesh(np.asarray(devices).reshape([high // low for low, high in spans]), names)

    def between(low: int, high: int) -> tuple[str, ...]:
        return tuple(n for n, (a, b) in zip(names, spans, strict=True) if low <= a and b <= high and b > a)

    def partition(name: str, split: Split) -> Partition:
        inner = split.tensor
        middle = split.tensor * split.fsdp
        by_role = {"tensor": between(1, inner)[::-1], "fsdp": between(inner, middle), "data": between(middle, count)}
        rules = {logical: tuple(a for role in roles for a in by_role[role]) for logical, roles in ROLES.items()}
        return Partition(name, mesh, rules, split)

    return partition("train", train), partition("rollout", rollout)


def _chain(sizes: Sequence[int]) -> bool:
    """Whether each size divides the next larger one."""
    return all(high % low == 0 for low, high in itertools.pairwise(sorted(set(sizes))))


def axis_faults(
    partition: Partition, *, heads: int, kv_heads: int, mlp: int, hidden: int, whose: str = "the model's"
) -> list[str]:
    """What in a split does not divide a model, each with the sizes that would.

    Args:
      partition: with resolved sizes.
      heads: query heads.
      kv_heads: key-value heads; may be fewer than the tensor axis, and are then replicated.
      mlp: width of the MLP.
      hidden: width of the residual stream.
      whose: begins the model's part of a message.

    Returns:
      One message a fault.
    """
    tensor, fsdp, devices = partition.split.tensor, partition.split.fsdp, partition.mesh.size
    name = f"config.parallel.{partition.name}"
    works = [
        d for d in divisors(devices) if heads % d == 0 and mlp % d == 0 and (kv_heads % d == 0 or d % kv_heads == 0)
    ]
    faults = [
        f"{name}.tensor = {tensor} does not divide {whose} {what} = {size}; one of {works} would"
        for what, size in (("heads", heads), ("mlp", mlp))
        if size % tensor
    ]
    if kv_heads % tensor and tensor % kv_heads:
        faults.append(
            f"{name}.tensor = {tensor} and {whose} kv_heads = {kv_heads}: one must divide the other; "
            f"one of {works} would do"
        )
    if hidden % fsdp:
        fitting = [d for d in divisors(devices // tensor) if hidden % d == 0]
        faults.append(f"{name}.fsdp = {fsdp} does not divide {whose} hidden = {hidden}; one of {fitting} would")
    return faults


def shardings(abstract: PyTree, axes: PyTree, partition: Partition) -> PyTree:
    """The sharding of every leaf of a tree.

    Args:
      abstract: tree of arrays or ``ShapeDtypeStruct``.
      axes: the same tree with a tuple of logical axis names in the place of each leaf.
      partition: where to.
    """
    return jax.tree.map(lambda leaf, names: partition.sharding(names, leaf.shape), abstract, axes)
