"""What a checkpoint is to the loader, named tensors that can be read by slices; errors of reading and writing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from yatt_jax.errors import InputError
from yatt_jax.models.names import Slices


class CheckpointError(InputError):
    """A model folder or file that cannot be read; the message names file and tensor, and how to mend it."""


class ExportError(InputError):
    """A folder that cannot be written; the message says why and what to do."""


class TensorSource(Protocol):
    """Named tensors on disk, under Hugging Face names and in Hugging Face layout."""

    def names(self) -> Sequence[str]:
        """Every tensor of the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a tensor, known without reading it."""
        ...

    def read(self, name: str, slices: Slices) -> np.ndarray:
        """Part of a tensor, in the dtype it is stored in (dequantized where it is quantized).

        Args:
          name: one of ``names()``.
          slices: one slice of step 1 per dimension, with explicit bounds.
        """
        ...

    def file_of(self, name: str) -> str:
        """The file a tensor lies in, for messages."""
        ...
