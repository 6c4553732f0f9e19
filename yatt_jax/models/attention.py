"""Attention behind one function: which form runs where.

The devices of the active partition decide, and not the process's default backend: a program may be compiled on one
machine for another. ``jax.lax.platform_dependent`` would decide later, but traces every form into every program, and a
gradient then holds what any of them keeps for its backward pass: the ``[T, T]`` weights of ``plain`` too.

======== ==================================================== ==========================================================
devices  packed rows                                          a cache
======== ==================================================== ==========================================================
TPU      ``splash``; ``plain`` for rows below a block;        ``cache``
         with spans as others
NVIDIA   ``cudnn`` in half precision, without a soft cap      ``plain``
others   ``blocks``; ``plain`` for short rows                 ``plain``
======== ==================================================== ==========================================================
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Int

from yatt_jax.ops.attention import Cached, Seen, plain
from yatt_jax.ops.attention_blocks import blocks
from yatt_jax.ops.attention_cudnn import cudnn
from yatt_jax.parallel.partition import Partition, active_partition

Form: TypeAlias = Literal["plain", "blocks", "splash", "cache", "cudnn"]

_SHORT = 128  # tokens of a row up to which its logits at once are quicker than block by block
_SHORT_GPU = 1024
_TPU_PLACES = 128  # a TPU's caches have a multiple of so many: others would be copied to be padded, at every call
_CACHE = (None, "rows", "act_kv_heads", None, None)


def choose(
    device: Any,
    seen: Seen,
    *,
    tokens: int,
    head_dim: int,
    dtype: DTypeLike,
    softcap: float,
) -> Form:
    """The form for devices like this one.

    Args:
      device: of the program; None where it is not known, for what runs anywhere.
      seen: packed rows or a cache.
      tokens: queries in a row.
      head_dim: size of a head.
      dtype: of the queries.
      softcap: of the logits; 0 is off.
    """
    platform = device.platform if device is not None else ""
    if isinstance(seen, Cached):
        return "cache" if platform == "tpu" else "plain"
    if platform == "tpu" and seen.spans is None:
        return "splash" if tokens >= _SHORT else "plain"
    if platform == "gpu":
        half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
        if half and not softcap and head_dim % 8 == 0 and head_dim <= 128 and _has_cudnn(device):
            return "cudnn"
        return "blocks" if tokens > _SHORT_GPU else "plain"
    return "blocks" if tokens > _SHORT else "plain"


def _has_cudnn(device: Any) -> bool:
    """Whether cuDNN's attention runs on a GPU: NVIDIA's from Ampere on, whose capability is "8.0" or more."""
    capability = str(getattr(device, "compute_capability", "")).split(".")
    return capability[0].isdigit() and int(capability[0]) >= 8


def keys_places_last(device: Any) -> bool:
    """Whether a cache for devices like this one has its keys as ``[L, B, J, K, S]`` (see ``Cached``)."""
    return device.platform == "cpu"


def writes_by_head() -> bool:
    """Whether the program being traced writes to its cache one head at a time.

    Where heads are written together, the TPU compiler lays the cache out with a place's heads side by side, and turns
    all of it round for the kernel, in each layer of each step.
    """
    partition = active_partition()
    return partition is not None and partition.device.platform == "tpu"


def cache_places(device: Any, tokens: int) -> int:
    """Places of a cache for rows of at most so many tokens, on devices like this one."""
    return -(-tokens // _TPU_PLACES) * _TPU_PLACES if device.platform == "tpu" else tokens


def attend(
    q_BTHK: Float[Array, "B T H K"],
    keys: Array,
    values: Array,
    seen: Seen,
    *,
    windows: tuple[int, ...],
    which: int | Int[Array, ""],
    scale: float,
    softcap: float,
    form: Form | Literal["auto"] = "auto",
    interpret: bool = False,
) -> Float[Array, "B T H K"]:
    """Grouped-query attention, as ``ops.attention.plain`` defines it, on each device for its own rows and heads.

    Args:
      q_BTHK: queries.
      keys: of packed rows ``[B, J, T, K]``; of a cache all its layers, as ``Cached`` says.
      values: the same.
      seen: what is visible.
      windows: the sliding windows that layers of the model have, in tokens; 0 is none.
      which: index of this layer's window. Where it is traced and kernels must know the window, each window of the
        model has its own kernel in the program.
      scale: multiplies the logits.
      softcap: logits become ``softcap * tanh(x / softcap)``; 0 is off.
      form: which implementation; by default the best for the active partition's devices. Outside a partition, one
        that runs anywhere.
      interpret: run the program of a TPU kernel on any platform, slowly.

    Returns:
      Outputs in the dtype of the queries; zeros, never NaN, for a query that sees nothing.
    """
    partition = active_partition()
    if partition is not None:
        _, held, wanted = _heads(partition, q_BTHK.shape, keys.shape, seen)
        if not wanted or (wanted < held and isinstance(seen, Cached)):
            # Left to the compiler: a kernel would need a copy of the device's heads of all layers.
            form, partition = "plain", None
    if form == "auto":
        form = choose(
            partition.device if partition else None,
            seen,
            tokens=q_BTHK.shape[1],
            head_dim=q_BTHK.shape[3],
            dtype=q_BTHK.dtype,
            softcap=softcap,
        )
    run = functools.partial(_run, form, windows, scale=scale, softcap=softcap, interpret=interpret)
    if partition is None or partition.mesh.size == 1:
        return run(q_BTHK, keys, values, seen, which)
    return _by_device(partition, run, q_BTHK, keys, values, seen, which)


def _run(
    form: Form,
    windows: tuple[int, ...],
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: Any,
    which: int | jax.Array,
    *,
    scale: float,
    softcap: float,
    interpret: bool,
) -> jax.Array:
    """A form on one device."""
    known = windows[which] if isinstance(which, int) else windows[0] if len(windows) == 1 else None
    if form in ("splash", "cudnn"):
        kernel = _splash(softcap, interpret) if form == "splash" else cudnn
        of_window = lambda window: functools.partial(kernel, window=window, scale=scale)  # noqa: E731
        if known is not None:
            return of_window(known)(q, keys, values, seen)
        return jax.lax.switch(which, [of_window(window) for window in windows], q, keys, values, seen)
    window = jnp.asarray(windows, jnp.int32)[which] if known is None else known
    function = {"blocks": blocks, "plain": plain}.get(form) or _cached(interpret)
    return function(q, keys, values, seen, window=window, scale=scale, softcap=softcap)


# Importing the TPU kernels takes a second, and needs what other platforms may lack.


def _splash(softcap: float, interpret: bool) -> Callable[..., jax.Array]:
    from yatt_jax.ops.attention_splash import splash

    return functools.partial(splash, softcap=softcap, interpret=interpret)


def _cached(interpret: bool) -> Callable[..., jax.Array]:
    from yatt_jax.ops.attention_cache import cached

    return functools.partial(cached, interpret=interpret)


def _specs(
    partition: Partition, q_shape: tuple[int, ...], keys_shape: tuple[int, ...], seen: Seen
) -> tuple[PartitionSpec, PartitionSpec]:
    """How queries, and keys and values, are split. Keys of few heads lie whole where several devices share a head."""
    keys = _CACHE if isinstance(seen, Cached) else ("rows", "act_kv_heads", None, None)
    return partition.spec(("rows", None, "act_heads", None), q_shape), partition.spec(keys, keys_shape)


def _axes(spec: PartitionSpec, dimension: int) -> tuple[str, ...]:
    entry = spec[dimension] if dimension < len(spec) else None
    return (entry,) if isinstance(entry, str) else (entry or ())


def _index(axes: tuple[str, ...]) -> jax.Array | int:
    return jax.lax.axis_index(axes) if axes else 0


def _heads(
    partition: Partition, q_shape: tuple[int, ...], keys_shape: tuple[int, ...], seen: Seen
) -> tuple[int, int, int]:
    """Query heads of a device, the key-value heads that it holds, and how many of those its queries want.

    The last is 0 where its queries end within a key-value head that they do not begin: then nothing fits.
    """
    queries, keys = _specs(partition, q_shape, keys_shape, seen)
    H, J = q_shape[2], keys_shape[-3]
    own = H // math.prod(partition.mesh.shape[axis] for axis in _axes(queries, 2))
    held = J // math.prod(partition.mesh.shape[axis] for axis in _axes(keys, len(keys_shape) - 3))
    return own, held, own * J // H if own * J % H == 0 else int(H % (own * J) == 0)


def _by_device(
    partition: Partition,
    run: Callable[..., jax.Array],
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: Seen,
    which: int | jax.Array,
) -> jax.Array:
    """Runs a form on each device for its own rows and heads: kernels cannot be split by the compiler."""
    of_q, of_keys = _specs(partition, q.shape, keys.shape, seen)
    own, held, wanted = _heads(partition, q.shape, keys.shape, seen)
    heads, kv_heads = q.shape[2], keys.shape[-3]
    rows = PartitionSpec(_axes(of_q, 0) or None)
    of_seen = jax.tree.map(lambda x: rows if x.ndim else PartitionSpec(), seen)

    def local(q: jax.Array, keys: jax.Array, values: jax.Array, seen: Seen, *traced: jax.Array) -> jax.Array:
        if wanted < held:
            first = _index(_axes(of_q, 2)) * own * kv_heads // heads - _index(_axes(of_keys, keys.ndim - 3)) * held
            keys, values = (jax.lax.dynamic_slice_in_dim(x, first, wanted, axis=x.ndim - 3) for x in (keys, values))
        return run(q, keys, values, seen, traced[0] if traced else which)

    traced = () if isinstance(which, int) else (which,)
    mapped = jax.shard_map(
        local,
        mesh=partition.mesh,
        in_specs=(of_q, of_keys, of_keys, of_seen, *(PartitionSpec() for _ in traced)),
        out_specs=of_q,
        check_vma=False,
    )
    return mapped(q, keys, values, seen, *traced)
