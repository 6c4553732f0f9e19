"""Converts a model to a stock Hugging Face folder.

    python -m tools.convert_hf FILE.gguf OUT_DIR [--dtype float32|bfloat16|float16] [--shard_gb SIZE]
    python -m tools.convert_hf FOLDER OUT_DIR
    python -m tools.convert_hf RUN_DIR[@STEP] OUT_DIR [--role actor|critic|reward]

Reads a GGUF file, a Hugging Face folder (language model, critic or reward model), or a checkpoint of a run (the newest
by default), and writes a folder that transformers and vLLM load.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from yatt_jax.controller.saved_model import Source, from_run, run_of
from yatt_jax.errors import InputError
from yatt_jax.io import gguf
from yatt_jax.io.export import save_folder
from yatt_jax.io.hf import ModelFolder, load_model, read_folder
from yatt_jax.models.build import Kind
from yatt_jax.parallel.partition import Partition, Split, make_partitions


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


def from_model(path: Path, dtype: str, partition: Partition) -> Source:
    """The model of a folder or a GGUF file.

    Raises:
      CheckpointError: it cannot be read.
    """
    folder = read_folder(path)
    bar = Progress(TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("tensors"), transient=True)
    with bar:
        task = bar.add_task("read")
        model, params = load_model(
            path,
            kind_of(folder),
            partition,
            dtype=dtype,
            progress=lambda n, total, _: bar.update(task, completed=n, total=total),
        )
    return Source(model, params, folder.hf_config, tokenizer_of(folder.path), folder.generation_config)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.convert_hf", description="Converts a model to a stock Hugging Face folder."
    )
    parser.add_argument("source", help=".gguf file, Hugging Face folder, or run directory with or without @STEP")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--role", choices=("actor", "critic", "reward"), help="of a run: which model")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the tensors; float32 by default, or as the run trained them",
    )
    parser.add_argument("--shard_gb", type=float, default=4.0, help="largest safetensors file, in 10^9 bytes")
    parser.add_argument("--force", action="store_true", help="replace a folder that is not an earlier export")
    args = parser.parse_args(arguments)
    try:
        partition, _ = make_partitions(Split(), Split(), jax.devices()[:1])
        run = run_of(args.source)
        if run is None:
            dtype = args.dtype or "float32"
            source = from_model(Path(args.source), dtype, partition)
        else:
            source = from_run(*run, args.role, partition)
            dtype = args.dtype or str(jax.tree.leaves(source.params)[0].dtype)
        save_folder(
            args.out,
            source.model,
            source.params,
            source.hf_config,
            source.tokenizer,
            dtype=dtype,
            shard_bytes=int(args.shard_gb * 1e9),
            generation_config=source.generation_config,
            run=source.run,
            force=args.force,
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {source.model.parameter_count / 1e6:.1f} M parameters, {source.model.kind}, {dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
