"""The arrays of a checkpoint, written and read by orbax.

A tree is stored flat, each array under the names on its way from the root, as "states.actor.opt.1.mu.layers.query".
Named tuples, dataclasses and None need no care then, an array that is missing or of another shape is told by its name,
and a part of a tree can be read alone. Arrays are cut into pieces of a bounded size, so that any other sharding reads
little more than it needs. They are not compressed: weights hardly shrink, and it would make both directions slower.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from yatt_jax.errors import nearest
from yatt_jax.io.checkpoint_files import SavedRunError
from yatt_jax.types import PyTree

_CHUNK_BYTES = 64 * 2**20
_FILE_BYTES = 256 * 2**20  # files of this size, so that several threads and processes can share their checksums
_BACKGROUND_BARRIERS = 2  # of a save by several processes: all have written, and the first has joined their parts


def flatten(tree: PyTree) -> dict[str, Any]:
    """Name -> leaf, in the tree's order.

    Raises:
      ValueError: two leaves of one name, because a key holds a dot.
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in found:
            raise ValueError(f"two arrays of a checkpoint have the name {name!r}: keys must not hold dots")
        found[name] = leaf
    return found


def check_arrays(arrays: Mapping[str, Any]) -> None:
    """Checks that every leaf is an array.

    Raises:
      TypeError: one is not; the message names it.
    """
    for name, x in arrays.items():
        if not isinstance(x, jax.Array):
            raise TypeError(f"{name}: a checkpoint's tree holds jax arrays, and this is a {type(x).__name__}")


def describe(arrays: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape)."""
    return {name: (str(x.dtype), tuple(x.shape)) for name, x in arrays.items()}


class ArrayWriter:
    """Writes arrays in the background, one tree at a time.

    Args:
      name: of this writer, the same in every process and unique in the job.
      timeout_s: longest time a save may take.
    """

    def __init__(self, name: str, timeout_s: int) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._saves = self._passed = 0
        self._wait: Callable[..., None] = ocp.multihost.get_barrier_sync_fn()
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(use_compression=False),
            async_options=ocp.options.AsyncOptions(
                timeout_secs=timeout_s, barrier_sync_fn=self._barrier, create_directories_asynchronously=False
            ),
        )

    def start(self, path: epath.Path, arrays: Mapping[str, jax.Array]) -> None:
        """Copies the arrays to the host and returns; they may be donated from then on.

        Every process must call it. ``finish`` tells whether they were written.
        """
        self._saves, self._passed = self._saves + 1, 0
        pieces = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays}
        logging.getLogger("absl").addFilter(_without_traceback)  # until the end of finish
        self._checkpointer.save(path, args=ocp.args.PyTreeSave(dict(arrays), pieces, _FILE_BYTES))

    def finish(self) -> None:
        """Waits until the arrays of all processes are on the storage.

        Raises:
          Exception: of orbax, where this process could not write; the others are not kept waiting.
        """
        try:
            self._checkpointer.wait_until_finished()
        finally:
            logging.getLogger("absl").removeFilter(_without_traceback)
            while self._passed < _BACKGROUND_BARRIERS:
                self._barrier()

    def meet(self) -> None:
        """Waits, in the background, for all processes to have come here."""
        self._barrier()

    def close(self) -> None:
        """Waits for what is being written."""
        self._checkpointer.close()

    def _barrier(self, *, key: str = "", timeout_ms: int = 0) -> None:
        # orbax's own keys are the same for every save, and a barrier can be passed once. Numbered ones also let a
        # process that failed pass those it did not come to.
        self._passed += 1
        own = f"yatt_jax/checkpoint/{self._name}/{self._saves}/{self._passed}"
        self._wait(key=own, timeout_ms=timeout_ms or self._timeout_s * 1000)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Leaves out what orbax logs when a save fails: pages of its own frames, before an error that it raises as well."""
    return not (record.exc_info and "orbax" in record.pathname)


def check_same(
    saved: Mapping[str, tuple[str, tuple[int, ...]]], wanted: Mapping[str, Any], path: epath.Path, *, partial: bool
) -> None:
    """Whether a checkpoint holds the arrays that a run needs.

    Raises:
      SavedRunError: naming the arrays that are missing, left over, or of another shape or dtype.
    """
    needed = describe(wanted)
    differ = [
        f"{name} was {dtype}{list(shape)} and is now {needed[name][0]}{list(needed[name][1])}"
        for name, (dtype, shape) in saved.items()
        if name in needed and needed[name] != (dtype, shape)
    ]
    absent = [f"{name} is not there{nearest(name, saved)}" for name in needed if name not in saved]
    over = [] if partial else [f"{name} is there and not needed" for name in saved if name not in needed]
    found = [*differ, *absent, *over]
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise SavedRunError(
            f"{path}: holds the arrays of another model, algorithm or optimizer: {'; '.join(found[:5])}{more}"
        )


def read(path: epath.Path, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Reads arrays into the given shardings; every process reads what lies on its devices.

    Args:
      path: of the arrays.
      wanted: name -> array or ``ShapeDtypeStruct`` with a sharding.
    """
    for name, x in wanted.items():
        if getattr(x, "sharding", None) is None:
            raise TypeError(f"{name}: needs a sharding, to say where it is read to")
    how = {
        name: ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)
        for name, x in wanted.items()
    }
    item = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in wanted.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True))
