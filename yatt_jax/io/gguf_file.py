"""The container of a GGUF file: metadata and tensor table.

The ``gguf`` package supplies the constants and the dequantization. Its reader visits every vocabulary entry through a
memory map (5 s for 49k tokens, against 0.3 s here) and meets a truncated file with an index error, so the header is
walked here. Layout: the GGUF specification of ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from yatt_jax.io.tensors import CheckpointError

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_PLAIN = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table.

    Attributes:
      shape: sizes, outermost first (ggml lists them innermost first).
      kind: how elements are stored.
      offset: of its first byte in the file.
      size: in bytes.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


class GgufFile:
    """A GGUF file, its header read and its tensors left on disk.

    Attributes:
      path: of the file.
      metadata: key -> number, bool, string or list.
      tensors: name -> entry.
    """

    def __init__(self, path: str | Path):
        """Reads the header.

        Raises:
          CheckpointError: no such file, not a GGUF file, or a truncated one.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(f"{self.path}: no such file")
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._bytes = np.memmap(self.path, np.uint8, "r") if self.path.stat().st_size else np.zeros(0, np.uint8)
        with self.path.open("rb") as file:
            try:
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise CheckpointError(f"{self.path}: the file is empty; copy or download it again") from error
            with view:
                self._read_header(_Cursor(view, self.path))

    def _read_header(self, cursor: _Cursor) -> None:
        if cursor.take(4) != b"GGUF":
            raise CheckpointError(f"{self.path}: not a GGUF file (it does not begin with the letters GGUF)")
        version = cursor.number("I")
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.path}: GGUF version {version} or a big-endian file; little-endian versions 2 and 3 are read"
            )
        tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
        for _ in range(key_count):
            key = cursor.string()
            cursor.where = f"metadata key {key}"
            self.metadata[key] = cursor.value(cursor.number("I"))
        table = []
        for _ in range(tensor_count):
            name = cursor.string()
            cursor.where = f"table entry of tensor {name}"
            sizes = [cursor.number("Q") for _ in range(cursor.number("I"))]
            table.append((name, tuple(reversed(sizes)), cursor.number("I"), cursor.number("Q")))
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-cursor.at // alignment) * alignment
        for name, shape, raw_kind, offset in table:
            self.tensors[name] = self._entry(name, shape, raw_kind, start + offset)

    def _entry(self, name: str, shape: tuple[int, ...], raw_kind: int, offset: int) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(raw_kind)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} has storage type {raw_kind}, unknown to the installed gguf package; "
                f"upgrade gguf, or quantize the file to another type"
            ) from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block:
            raise CheckpointError(
                f"{self.path}: tensor {name} of shape {shape} does not divide into {kind.name} blocks"
            )
        size = math.prod(shape) // block * block_bytes
        if offset + size > len(self._bytes):
            raise CheckpointError(
                f"{self.path}: truncated: tensor {name} ends at byte {offset + size} of {len(self._bytes)}; "
                f"copy or download it again"
            )
        return GgufTensor(shape, kind, offset, size)

    def rows(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """Some rows (entries of the outermost dimension) of a tensor, dequantized.

        Returns:
          float16 where the file holds float16, else float32.
        """
        entry = self.tensors[name]
        raw = self._bytes[entry.offset : entry.offset + entry.size].reshape(entry.shape[0], -1)[rows]
        raw = np.ascontiguousarray(raw)
        plain = _PLAIN.get(entry.kind)
        if plain is not None:
            values = raw.view(plain)
        else:
            try:
                values = dequantize(raw, entry.kind)
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{self.path}: the gguf package cannot dequantize {entry.kind.name} of tensor {name}; "
                    f"quantize the file to another type"
                ) from error
        return values.reshape(raw.shape[0], *entry.shape[1:])


class _Cursor:
    """Walks the header; running off the end is an error that says where."""

    def __init__(self, view: mmap.mmap, path: Path):
        self.view, self.path = view, path
        self.at = 0
        self.where = "the header"

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.view):
            raise CheckpointError(
                f"{self.path}: truncated in {self.where}: {end} bytes are needed and the file has {len(self.view)}; "
                f"copy or download it again"
            )
        piece = self.view[self.at : end]
        self.at = end
        return piece

    def number(self, code: str) -> int:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, raw_kind: int) -> Any:
        try:
            kind = GGUFValueType(raw_kind)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: {self.where} has value type {raw_kind}: the file is corrupt"
            ) from error
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return list(self._array())
        code = _SCALARS[kind]
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def _array(self) -> Iterator[Any]:
        raw_kind, count = self.number("I"), self.number("Q")
        code = _SCALARS.get(GGUFValueType(raw_kind)) if raw_kind <= max(GGUFValueType) else None
        if code is None:
            for _ in range(count):
                yield self.value(raw_kind)
        else:
            yield from struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code)))
