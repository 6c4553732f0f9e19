"""The files of a checkpoint, and how one is known to be whole.

    step_00000012/
      arrays/             what orbax wrote
      process_0.json      what each process keeps for itself                      one file a process
      common.json         what they have in common                                process 0
      checkpoint.json     size and SHA-256 of every file above, and of itself     process 0, last

``checkpoint.json`` comes into being in one moment, after everything else is on the disk. A folder without it is what an
interrupted save left behind; a folder with it is whole if every file has the size and checksum written there. Nothing
else, no name and no order of writing, decides that, so it holds on object stores too.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from yatt_jax.errors import InputError, RunFailure

MANIFEST, COMMON, ARRAYS = "checkpoint.json", "common.json", "arrays"
_FORMAT = 1
_STEP = re.compile(r"step_(\d{8,})")
_THREADS = min(8, os.cpu_count() or 1)
_PIECE = 4 * 2**20


class SavedRunError(InputError):
    """A checkpoint that cannot be used; the message names the file or array, and how to go on."""


class CheckpointFailure(RunFailure):
    """A checkpoint that could not be written; earlier ones are as they were."""


class FileSum(NamedTuple):
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What ``checkpoint.json`` says.

    Attributes:
      step: steps done.
      metric: of the policy that keeps the best; None where it was not measured.
      processes: how many saved it.
      arrays: name -> (dtype, shape).
      files: name below the folder -> size and checksum.
    """

    step: int
    metric: float | None
    processes: int
    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    files: Mapping[str, FileSum]

    def to_bytes(self) -> bytes:
        """The file: the content, and its checksum."""
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        return _canonical({"sha256": _sum_of(content), "content": content})

    @staticmethod
    def from_bytes(raw: bytes) -> Manifest:
        """Reads the file.

        Raises:
          ValueError: it is not what was written, or of a format that this version does not know.
        """
        try:
            whole = json.loads(raw)
            content, expected = whole["content"], whole["sha256"]
        except (ValueError, KeyError, TypeError):
            raise ValueError("truncated or damaged") from None
        if _sum_of(content) != expected:
            raise ValueError("damaged: its checksum differs")
        if content.pop("format") != _FORMAT:
            raise ValueError("written by another version of yatt_jax, in a format that this one does not know")
        arrays = {name: (dtype, tuple(shape)) for name, (dtype, shape) in content.pop("arrays").items()}
        files = {name: FileSum(*found) for name, found in content.pop("files").items()}
        return Manifest(**content, arrays=arrays, files=files)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sum_of(content: Any) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def is_remote(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is a URL."""
    return "://" in os.fspath(folder)


def open_folder(name: str | os.PathLike[str], *, create: bool) -> epath.Path:
    """The folder of a run's checkpoints.

    Raises:
      SavedRunError: not a place that checkpoints can be written to.
    """
    text = os.fspath(name)
    if "://" in text and not text.startswith("gs://"):
        raise SavedRunError(
            f"checkpoint.folder = {text}: orbax reaches local and mounted folders and gs://; mount this one"
        )
    folder = epath.Path(text) if is_remote(name) else epath.Path(os.path.abspath(os.path.expanduser(text)))
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        if folder.exists() and not folder.is_dir():
            raise SavedRunError(f"checkpoint.folder = {text} is a file: name a folder")
    except SavedRunError:
        raise
    except ImportError as error:
        raise SavedRunError(f"checkpoint.folder = {text}: {error}; pip install gcsfs") from error
    except Exception as error:  # each storage has errors of its own
        raise SavedRunError(f"checkpoint.folder = {text}: cannot be used: {reason(error)}") from error
    return folder


def step_folder(folder: epath.Path, step: int) -> epath.Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}"


def step_folders(folder: epath.Path) -> dict[int, epath.Path]:
    """Every folder of a step, whole or not, by step."""
    if not folder.exists():
        return {}
    found = {path: _STEP.fullmatch(path.name) for path in folder.iterdir()}
    return {int(match[1]): path for path, match in sorted(found.items()) if match}


def committed(folder: epath.Path) -> list[int]:
    """Steps whose checkpoint was written to its end, ascending; their files are not checked."""
    return [step for step, path in step_folders(folder).items() if (path / MANIFEST).exists()]


def read_manifest(path: epath.Path) -> Manifest:
    """The manifest of a step's folder.

    Raises:
      SavedRunError: it is missing or damaged.
    """
    file = path / MANIFEST
    try:
        manifest = Manifest.from_bytes(file.read_bytes())
        if step_folder(path.parent, manifest.step) != path:
            raise ValueError(f"of step {manifest.step}: the folder has been renamed")
        return manifest
    except FileNotFoundError:
        raise SavedRunError(f"{file}: missing") from None
    except (ValueError, OSError) as error:
        raise SavedRunError(f"{file}: {error}") from error


def list_files(path: epath.Path) -> list[str]:
    """Every file below a folder, as names below it, in an order that is the same in every process."""

    def below(folder: epath.Path, prefix: str) -> Iterator[str]:
        for entry in folder.iterdir():
            if entry.is_dir():
                yield from below(entry, f"{prefix}{entry.name}/")
            else:
                yield prefix + entry.name

    return sorted(below(path, ""))


def sum_files(path: epath.Path, names: Sequence[str]) -> dict[str, FileSum]:
    """Sizes and checksums; each file is read once, in pieces, several at a time.

    Raises:
      OSError: a file cannot be read.
    """

    def one(name: str) -> FileSum:
        found, size = hashlib.sha256(), 0
        with (path / name).open("rb") as content:
            while piece := content.read(_PIECE):
                found.update(piece)
                size += len(piece)
        return FileSum(size, found.hexdigest())

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def faults(path: epath.Path, manifest: Manifest, names: Sequence[str]) -> list[str]:
    """What is wrong with files of a checkpoint, each message beginning with the file's path."""

    def one(name: str) -> str:
        size, expected = manifest.files[name]
        file = path / name
        try:
            found = file.stat().length
            if found != size:
                return f"{file}: has {found} bytes, and {size} were written"
            return "" if sum_files(path, [name])[name].sha256 == expected else f"{file}: damaged: its checksum differs"
        except FileNotFoundError:
            return f"{file}: missing"
        except OSError as error:
            return f"{file}: cannot be read: {reason(error)}"

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return [fault for fault in pool.map(one, names) if fault]


def write_whole(file: epath.Path, content: bytes) -> None:
    """Writes a file so that it is there whole or not at all, and on the disk when this returns."""
    if is_remote(file):
        file.write_bytes(content)  # an object appears when its upload is complete
        return
    scratch = file.parent / f".{file.name}"
    with open(scratch, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.replace(scratch, file)
    _sync_folder(file.parent)


def _sync_folder(folder: epath.Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: epath.Path) -> None:
    """Deletes a step's folder; from the first moment on it no longer counts as a checkpoint.

    Raises:
      OSError: it cannot be deleted.
    """
    (path / MANIFEST).unlink(missing_ok=True)
    for left in reversed(range(5)):
        try:
            path.rmtree(missing_ok=True)
            return
        except OSError:  # writes of a save that failed half way may still come in
            if not left:
                raise
            time.sleep(0.2)


def encode(value: Any, where: str) -> bytes:
    """JSON from which ``json.loads`` gives the same value: floats keep every bit, tuples become lists.

    Raises:
      TypeError: a value that JSON cannot hold; the message says where.
    """
    _check_plain(value, where)
    return json.dumps(value, separators=(",", ":")).encode()


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: the key {key!r} is not a string, and would come back as one")
            _check_plain(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            _check_plain(inner, f"{where}[{i}]")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise TypeError(f"{where}: JSON cannot hold a {type(value).__name__}; a checkpoint's arrays go into its tree")


def free_bytes(folder: epath.Path) -> int | None:
    """Bytes that can still be written there; None where nobody knows."""
    try:
        return None if is_remote(folder) else shutil.disk_usage(folder).free
    except OSError:
        return None


def no_room(folder: epath.Path, needed: int = 0) -> str:
    """The message for a full disk.

    Args:
      folder: of the checkpoints.
      needed: bytes of the checkpoint, if they are known.
    """
    free = free_bytes(folder)
    amount = "" if free is None else f" ({_size(free)} free)"
    wants = f", and a checkpoint needs {_size(needed)}" if needed else ""
    return (
        f"{folder}: the disk is full{amount}{wants}: free some space, keep fewer checkpoints (checkpoint.keep), or put "
        "them elsewhere (checkpoint.folder); the earlier ones are as they were"
    )


def is_full(error: BaseException) -> bool:
    """Whether an error, or one that caused it, says that a disk or a quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(text in str(error) for text in ("No space left on device", "Disk quota exceeded")):
            return True
        cause = error.__cause__ or error.__context__
        if cause is None:
            return False
        error = cause
    return False


def reason(error: BaseException) -> str:
    """The first line of an error, and its kind where that says more."""
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, InputError | RunFailure) else f"{type(error).__name__}: {text}".rstrip(": ")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
