"""The safetensors files of a Hugging Face folder, read by slices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from yatt_jax.io.tensors import CheckpointError
from yatt_jax.models.names import Slices

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = ("F32", "F16", "BF16", "F64")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      CheckpointError: not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is needed, and it holds a {type(value).__name__}")
    return value


class SafetensorsFolder:
    """Tensors of a folder with ``model.safetensors``, or several files and an index."""

    def __init__(self, folder: Path):
        """Reads the headers of all files.

        Raises:
          CheckpointError: no weights, an index that names what is not there, or a truncated or corrupt file.
        """
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        index = folder / INDEX
        if index.is_file():
            self._open_indexed(index)
        else:
            self._open(_only_file(folder).name)

    def _open_indexed(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: no weight_map; copy or download it again")
        for tensor, file in weight_map.items():
            if not (self._folder / file).is_file():
                raise CheckpointError(
                    f"{index}: tensor {tensor} is said to lie in {file}, which is not in the folder; copy that file too"
                )
        for file in sorted(set(weight_map.values())):
            self._open(file)
        for tensor, file in weight_map.items():
            if self._file_of.get(tensor) != file:
                raise CheckpointError(f"{index}: tensor {tensor} is said to lie in {file}, which does not hold it")

    def _open(self, file: str) -> None:
        path = self._folder / file
        try:
            handle = safe_open(path, "numpy").__enter__()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: truncated or corrupt ({path.stat().st_size} bytes; {error}); copy or download it again"
            ) from error
        for name in handle.keys():  # noqa: SIM118  (not a dict)
            if name in self._file_of:
                raise CheckpointError(
                    f"{path}: tensor {name} is also in {self._file_of[name]}; remove one of the files"
                )
            self._file_of[name] = file
        self._files[file] = handle

    def names(self) -> Sequence[str]:
        """Every tensor of the folder."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a tensor.

        Raises:
          CheckpointError: stored in a dtype that is not read.
        """
        piece = self._files[self._file_of[name]].get_slice(name)
        if piece.get_dtype() not in _DTYPES:
            raise CheckpointError(
                f"{self.file_of(name)}: tensor {name} is stored as {piece.get_dtype()}; "
                f"{', '.join(_DTYPES)} are read: convert the folder first"
            )
        return tuple(piece.get_shape())

    def read(self, name: str, slices: Slices) -> np.ndarray:
        """Part of a tensor, in the dtype it is stored in."""
        return self._files[self._file_of[name]].get_slice(name)[slices]

    def file_of(self, name: str) -> str:
        """Path of the file a tensor lies in."""
        return str(self._folder / self._file_of[name])


def _only_file(folder: Path) -> Path:
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(
            f"{folder}: {len(files)} safetensors files and no {INDEX} to say which belong together; add the index"
        )
    older = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pth"))
    hint = f"; {older[0]} must be converted to safetensors first" if older else ""
    raise CheckpointError(f"{folder}: no {SINGLE} or {INDEX}{hint}")
