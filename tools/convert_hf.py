"""Converts a model to a stock Hugging Face folder.

    python -m tools.convert_hf FILE.gguf OUT_DIR [--dtype float32|bfloat16|float16]
    python -m tools.convert_hf FOLDER OUT_DIR

Reads a GGUF file or a Hugging Face folder (language model, critic or reward model) and writes a folder that
transformers and vLLM load.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from yatt_jax.io import gguf
from yatt_jax.io.export import ExportError, save_folder
from yatt_jax.io.hf import CheckpointError, ModelFolder, load_model, read_folder
from yatt_jax.models.build import Kind
from yatt_jax.parallel.partition import Split, make_partitions


def kind_of(folder: ModelFolder) -> Kind:
    """What a folder holds, by the architecture it names."""
    name = folder.architectures[0] if folder.architectures else ""
    if name.endswith("ForTokenClassification"):
        return "value"
    return "reward" if name.endswith("ForSequenceClassification") else "lm"


def tokenizer_of(path: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model; None where a folder has none."""
    if path.is_file():
        return gguf.load_tokenizer(path)
    return AutoTokenizer.from_pretrained(path) if (path / "tokenizer_config.json").is_file() else None


def convert(source: Path, out: Path, *, dtype: str, shard_bytes: int, force: bool) -> None:
    """Reads ``source`` and writes ``out``.

    Raises:
      CheckpointError: ``source`` cannot be read.
      ExportError: ``out`` cannot be written.
    """
    folder = read_folder(source)
    kind = kind_of(folder)
    partition, _ = make_partitions(Split(), Split(), jax.devices()[:1])
    bar = Progress(TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("tensors"), transient=True)
    with bar:
        task = bar.add_task("read")
        model, params = load_model(
            source,
            kind,
            partition,
            dtype=dtype,
            progress=lambda n, total, _: bar.update(task, completed=n, total=total),
        )
    save_folder(
        out,
        model,
        params,
        folder.hf_config,
        tokenizer_of(folder.path),
        dtype=dtype,
        shard_bytes=shard_bytes,
        generation_config=folder.generation_config,
        force=force,
    )
    print(f"{out}: {model.parameter_count / 1e6:.1f} M parameters, {kind}, {dtype}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.convert_hf", description="Converts a model to a stock Hugging Face folder."
    )
    parser.add_argument("source", type=Path, help=".gguf file or Hugging Face folder")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--shard_gb", type=float, default=4.0, help="largest safetensors file, in 10^9 bytes")
    parser.add_argument("--force", action="store_true", help="replace a folder that is not an earlier export")
    args = parser.parse_args(arguments)
    try:
        convert(args.source, args.out, dtype=args.dtype, shard_bytes=int(args.shard_gb * 1e9), force=args.force)
    except (CheckpointError, ExportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
