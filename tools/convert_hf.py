"""Converts a model to a stock Hugging Face folder.

    python -m tools.convert_hf FILE.gguf OUT_DIR [--dtype float32|bfloat16|float16] [--shard_gb SIZE]
    python -m tools.convert_hf FOLDER OUT_DIR
    python -m tools.convert_hf RUN_DIR[@STEP] OUT_DIR [--role actor|critic|reward]

Reads a GGUF file, a Hugging Face folder (language model, critic or reward model), or a checkpoint of a run (the newest
by default), and writes a folder that transformers and vLLM load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from yatt_jax import config as configuration
from yatt_jax.controller.plan import make_plan
from yatt_jax.errors import InputError
from yatt_jax.io import checkpoint_files, checkpoint_read, gguf
from yatt_jax.io.export import save_folder
from yatt_jax.io.hf import ModelFolder, load_model, read_folder
from yatt_jax.io.model_card import run_card
from yatt_jax.models.build import Kind, Model
from yatt_jax.parallel.partition import Partition, Split, make_partitions
from yatt_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Source:
    """A model with everything that its folder holds.

    Attributes:
      hf_config: its config.json.
      generation_config: its generation_config.json, if it has one.
      run: what the model card says of its training.
    """

    model: Model
    params: Params
    hf_config: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase | None
    generation_config: Mapping[str, Any] | None
    run: Mapping[str, Any] | None = None


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


def run_of(source: str) -> tuple[Path, int | None] | None:
    """The run directory and the step that ``RUN_DIR[@STEP]`` means; None where it is no run directory."""
    match = re.fullmatch(r"(.+)@(\d+)", source)
    path, step = (Path(match[1]), int(match[2])) if match and not Path(source).exists() else (Path(source), None)
    file = path / "config.json"
    if file.is_file() and "model_type" not in (values := _read_json(file)) and "config" in values:
        return path, step
    if step is not None:
        raise InputError(f"{source}: {path} is not a run directory: it has no config.json of a run")
    return None


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


def from_run(run: Path, step: int | None, role: str | None, partition: Partition) -> Source:
    """A role of a run, as a checkpoint has it.

    Args:
      run: the run directory.
      step: of the checkpoint; None: the newest that is whole.
      role: "actor", "critic" or "reward"; None: the one that the run exports.
      partition: where the parameters go.

    Raises:
      InputError: no such checkpoint, a damaged one, or a run whose config or model folder can no longer be read.
    """
    values = _read_json(run / "config.json")["config"]
    config = configuration.parse(values)
    trained = configuration.load_algo(config.algo).TRAINS
    wanted = role or ("actor" if "actor" in trained else trained[0])
    if wanted not in trained:
        raise InputError(f"{run}: {config.algo} trains no {wanted}")
    # Checkpoints are read into any sharding: that of the run may not fit the devices here.
    plan = make_plan(dataclasses.replace(config, parallel=type(config.parallel)()))
    model = plan.models[wanted]
    named = (values.get("checkpoint") or {}).get("folder")
    folder = checkpoint_files.open_folder(named or run / "checkpoints", create=False)
    found = checkpoint_read.find(folder, step)
    if found is None:
        raise InputError(f"{folder}: no checkpoint; a run saves them as config.checkpoint says")
    params = _read_role(found, wanted, model, partition)
    hf_config = read_folder(plan.paths[wanted]).hf_config if plan.paths[wanted] else plan.hf_config
    return Source(model, params, hf_config, plan.tokenizer, plan.generation_config, run_card(run, found.step))


def _read_role(found: checkpoint_read.Found, role: str, model: Model, partition: Partition) -> Params:
    """Reads the parameters of a role and nothing else of the checkpoint."""
    place = f"{role}.params"
    where = next((name.partition(place)[0] + place for name in found.arrays if f".{place}." in f".{name}"), None)
    if where is None:
        raise InputError(f"{found.path}: holds no parameters of the {role}")
    like: Any = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model.abstract,
        model.shardings(partition),
    )
    keys = where.split(".")
    for key in reversed(keys):
        like = {key: like}
    read = checkpoint_read.restore(found, like, partial=True)
    for key in keys:
        read = read[key]
    return read


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from error


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
