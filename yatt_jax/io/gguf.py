"""GGUF files as Hugging Face models."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from yatt_jax.io.gguf_file import GgufFile
from yatt_jax.io.gguf_tokenizer import tokenizer_from_metadata


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file, with its chat template and special tokens.

    Raises:
      CheckpointError: a missing, truncated or foreign file, or a tokenizer kind that is not known.
    """
    return tokenizer_from_metadata(GgufFile(path).metadata, str(path))
