"""The safetensors files of an export: which tensor goes where, and writing them from all processes at once.

Which file holds a tensor and which process writes it follow from names, shapes and sizes alone, so each process works
them out by itself. Tensors are moved one at a time (one layer of a stacked parameter, in Hugging Face layout) by a
compiled program that all processes run together; only the process that the tensor is dealt to brings it to its host,
and writes it while the next ones move. So a device holds three tensors at most beside the parameters, and a host one.

The format is described at https://huggingface.co/docs/safetensors: eight bytes of header length, a JSON header with
dtype, shape and offsets of every tensor, and their bytes without gaps.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from yatt_jax.io.safetensors_folder import SINGLE
from yatt_jax.io.tensors import ExportError
from yatt_jax.models.names import Layout, Leaf, flatten
from yatt_jax.types import Params

# What can be written, under the names of the format.
DTYPES: Mapping[str, tuple[str, Any]] = {
    "float32": ("F32", np.float32),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
    "float16": ("F16", np.float16),
}
# Marks our files in their header, so that a later export may replace the folder.
MARK = {"format": "pt", "written_by": "yatt_jax"}
# Elements that are converted and written at a time.
_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class TensorFile:
    """A file to be written.

    Attributes:
      name: within the folder.
      process: which process writes it.
      header: its first bytes, up to the tensors.
      tensors: what it holds, in the order of their bytes.
      size: of the whole file in bytes.
    """

    name: str
    process: int
    header: bytes
    tensors: tuple[str, ...]
    size: int


@dataclasses.dataclass(frozen=True)
class Written:
    """What one process did.

    Attributes:
      bytes: of tensors that it wrote.
      peak: most bytes of tensors that it held on its host at a time.
    """

    bytes: int
    peak: int


def tensor_shapes(leaves: Sequence[Leaf]) -> dict[str, tuple[int, ...]]:
    """Hugging Face shape of every checkpoint tensor, in the order they are moved."""
    return {names[0]: leaf.layout.hf_shape(leaf.inner) for leaf in leaves for names in leaf.names}


def owners(params: Params) -> list[int]:
    """The processes whose devices hold the parameters, ascending."""
    leaves = jax.tree.leaves(params)
    return sorted({device.process_index for leaf in leaves for device in leaf.sharding.device_set})


def plan_files(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, processes: Sequence[int], shard_bytes: int
) -> list[TensorFile]:
    """Deals the tensors out to the processes, by bytes, and each process's tensors to files.

    Each tensor goes to the process that has the fewest bytes so far. As tensors of one kind follow each other, the
    processes take turns, and all of them write at the same time.

    Args:
      shapes: of every tensor, in the order they are moved.
      dtype: of the tensors in the files.
      processes: those that write.
      shard_bytes: tensor bytes that a file may hold; a larger tensor has a file to itself.
    """
    width = np.dtype(DTYPES[dtype][1]).itemsize
    bytes_of = {name: math.prod(shape) * width for name, shape in shapes.items()}
    dealt = dict.fromkeys(processes, 0)
    shards: dict[int, list[list[str]]] = {process: [] for process in processes}
    filled = dict.fromkeys(processes, 0)
    for name, size in bytes_of.items():
        process = min(processes, key=lambda p: dealt[p])
        dealt[process] += size
        if not shards[process] or filled[process] + size > shard_bytes:
            shards[process].append([])
            filled[process] = 0
        shards[process][-1].append(name)
        filled[process] += size
    every = [(process, names) for process in processes for names in shards[process]]
    result = []
    for number, (process, names) in enumerate(every, 1):
        file = SINGLE if len(every) == 1 else f"model-{number:05d}-of-{len(every):05d}.safetensors"
        header = _header({name: shapes[name] for name in names}, dtype)
        size = len(header) + sum(bytes_of[name] for name in names)
        result.append(TensorFile(file, process, header, tuple(names), size))
    return result


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> bytes:
    code, numpy_type = DTYPES[dtype]
    entries: dict[str, Any] = {"__metadata__": MARK}
    start = 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape) * np.dtype(numpy_type).itemsize
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def weight_map(files: Sequence[TensorFile]) -> dict[str, str]:
    """The file of each tensor, as the index says it."""
    return {tensor: file.name for file in files for tensor in file.tensors}


def check_written(folder: Path, files: Sequence[TensorFile]) -> None:
    """Looks whether every file is there, whole.

    Raises:
      ExportError: one is not; the message names it and the process that should have written it.
    """
    for file in files:
        path = folder / file.name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ExportError(
                f"{path}: process {file.process} has written this file, and process {jax.process_index()} does not "
                "see it: the folder must lie on a file system that all processes share"
            ) from error
        if size != file.size:
            raise ExportError(
                f"{path}: has {size} bytes in place of the {file.size} that process {file.process} has written; "
                "look whether the file system is full or faulty, and export again"
            )


def write_tensors(
    folder: Path, files: Sequence[TensorFile], leaves: Sequence[Leaf], params: Params, dtype: str
) -> Written:
    """Writes this process's files. Every process that holds parameters must call it at the same time.

    A process that cannot write still takes part in every move, as the others need it, and raises at the end.

    Args:
      folder: where to; it must exist.
      files: the plan of all processes.
      leaves: the parameters and their checkpoint tensors.
      params: in any sharding.
      dtype: of the tensors in the files.

    Raises:
      OSError: a file cannot be written.
    """
    process = jax.process_index()
    if process not in owners(params):
        return Written(0, 0)
    mine = [file for file in files if file.process == process]
    own = set(weight_map(mine))
    with _Writer(folder, mine, dtype) as writer:

        def take(name: str, tensor: jax.Array) -> None:
            if name in own:
                writer.put(name, tensor)
            else:
                jax.block_until_ready(tensor)  # or moves, and their memory, would pile up

        waiting: collections.deque[tuple[str, jax.Array]] = collections.deque()
        for move in _moves(leaves, params, dtype):
            waiting.append(move)
            del move
            if len(waiting) > 1:
                take(*waiting.popleft())
        while waiting:
            take(*waiting.popleft())
    return Written(writer.bytes, writer.peak)


def _moves(leaves: Sequence[Leaf], params: Params, dtype: str) -> Iterator[tuple[str, jax.Array]]:
    """Starts moving one tensor after the other: each is whole on every device, in Hugging Face layout."""
    flat = dict(flatten(params))
    for leaf in leaves:
        value = flat[leaf.path]
        # Narrowed before it travels. Other conversions are the host's: a device may flush what is small in float16.
        moved = "bfloat16" if dtype == "bfloat16" else str(value.dtype)
        move = _mover(leaf.layout, leaf.stacked, moved, _everywhere(value.sharding))
        for layer, names in enumerate(leaf.names):
            yield names[0], move(value, layer)


def _everywhere(sharding: Sharding) -> Sharding | None:
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


@functools.cache
def _mover(layout: Layout, stacked: bool, dtype: str, target: Sharding | None) -> Callable[[Any, int], jax.Array]:
    def move(value: Any, layer: Any) -> Any:
        if stacked:
            value = jax.lax.dynamic_index_in_dim(value, layer, keepdims=False)
        return layout.to_hf(value.astype(dtype))

    return jax.jit(move, out_shardings=target)


def _to_host(tensor: jax.Array) -> np.ndarray:
    whole = tensor.addressable_data(0) if tensor.is_fully_replicated else tensor
    return np.ascontiguousarray(np.asarray(whole))


class _Writer:
    """Writes tensors in the order of the plan, one at a time, on a thread of its own.

    After a failure it lets the rest pass; the failure is raised at the end.

    Attributes:
      bytes: written so far.
      peak: most bytes held on the host at a time.
    """

    def __init__(self, folder: Path, files: Sequence[TensorFile], dtype: str):
        self._folder = folder
        self._starts = {file.tensors[0]: file for file in files}
        self._ends = {file.tensors[-1] for file in files}
        self._dtype = DTYPES[dtype][1]
        self._thread = ThreadPoolExecutor(1, "export")
        self._pending: Future[None] | None = None
        self._error: BaseException | None = None
        self._file: BinaryIO | None = None
        self._held = 0
        self.bytes = 0
        self.peak = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._wait()
        self._thread.shutdown()
        if self._file is not None:  # only after a failure, which is the one to report
            with contextlib.suppress(OSError):
                self._file.close()
        if self._error is not None and not any(error):
            raise self._error

    def put(self, name: str, tensor: jax.Array) -> None:
        """Takes a tensor over, once the one before it is written."""
        self._wait()
        if self._error is None:
            self._pending = self._thread.submit(self._write, name, [tensor])

    def _wait(self) -> None:
        if self._pending is not None:
            self._error = self._error or self._pending.exception()
            self._pending = None

    def _write(self, name: str, box: list[jax.Array]) -> None:
        host = _to_host(box.pop())  # out of the box, so that nothing keeps it on the device
        self._hold(host.nbytes)
        if name in self._starts:
            self._file = (self._folder / self._starts[name].name).open("wb")
            self._file.write(self._starts[name].header)
        assert self._file is not None
        flat = host.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK].astype(self._dtype, copy=False).view(np.uint8)
            self.bytes += self._file.write(part.data)
        if name in self._ends:
            self._file.flush()
            os.fsync(self._file.fileno())  # where a full or lost disk shows that has not shown yet
            self._file.close()
            self._file = None
        self._hold(-host.nbytes)

    def _hold(self, change: int) -> None:
        self._held += change
        self.peak = max(self.peak, self._held)
