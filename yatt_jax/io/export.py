"""Writing stock Hugging Face folders: what transformers and vLLM load without knowing where it came from."""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from yatt_jax.errors import InputError
from yatt_jax.io.safetensors_folder import INDEX, SINGLE
from yatt_jax.models.build import Model
from yatt_jax.models.families import family
from yatt_jax.models.names import Leaf, flatten, leaves_of
from yatt_jax.types import Params

# Marks our files in the safetensors header, so that a later export may replace the folder.
_MARK = {"format": "pt", "written_by": "yatt_jax"}
_NO_TOKEN_CLASSIFIER = ("gemma3_text",)


class ExportError(InputError):
    """A folder that cannot be written; the message says why and what to do."""


def save_folder(
    out_dir: str | Path,
    model: Model,
    params: Params,
    hf_config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    dtype: str = "bfloat16",
    shard_bytes: int = 4 * 10**9,
    generation_config: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Path:
    """Writes a model as a stock folder, all of it or nothing.

    A language model is written as such, a critic as a token-classification and a reward model as a
    sequence-classification folder. Tied weights are written once. Every process must call it; the first one writes.
    A host holds one file's tensors at a time.

    Args:
      out_dir: the folder. An earlier export at that place is replaced.
      model: what the parameters belong to.
      params: the parameters, in any sharding.
      hf_config: config.json of the folder the model came from, or ``families.to_hf`` of a model made here.
      tokenizer: written beside the weights, with its chat template; None leaves it out.
      dtype: of the tensors in the files: "float32", "bfloat16" or "float16".
      shard_bytes: size a safetensors file may have; more tensors go to further files, with an index.
      generation_config: generation_config.json of a language model; end tokens of tokenizer and config by default.
      force: replace a folder that is not an earlier export.

    Returns:
      The folder.

    Raises:
      ExportError: the folder holds something else, or the model does not fit ``hf_config``.
    """
    out = Path(out_dir)
    chosen = family(hf_config.get("model_type"))
    leaves = leaves_of(chosen.names, model.abstract)
    values = _config(model, dict(hf_config), tokenizer, dtype)
    if chosen.from_hf(values).vocab != model.config.vocab:
        raise ExportError(f"{out}: hf_config has vocab_size {values['vocab_size']}, and the model {model.config.vocab}")
    if model.kind == "value" and chosen.model_type in _NO_TOKEN_CLASSIFIER:
        warnings.warn(
            f"{out}: transformers has no class for a {chosen.model_type} critic; yatt_jax reads it",
            stacklevel=2,
        )
    _check_free(out, force)
    if jax.process_index() != 0:
        for _ in _tensors(leaves, params, dtype):
            pass  # takes part in gathering what no process holds alone
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(out, "partial")
    try:
        _write_tensors(partial, leaves, params, dtype, shard_bytes)
        _write_json(partial / "config.json", values)
        if model.kind == "lm":
            _write_json(partial / "generation_config.json", _generation(values, tokenizer, generation_config))
        if tokenizer is not None:
            _write_tokenizer(partial, tokenizer)
        _move_into_place(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def _config(
    model: Model, values: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, dtype: str
) -> dict[str, Any]:
    """config.json of the kind of model that is written."""
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ExportError(f"dtype = {dtype!r}: float32, bfloat16 or float16 can be written")
    for key in ("dtype", "_name_or_path", "id2label", "label2id", "num_labels", "problem_type", "classifier_dropout"):
        values.pop(key, None)
    values["architectures"] = [family(values["model_type"]).architectures[model.kind]]
    values["torch_dtype"] = dtype
    if model.kind == "lm":
        values["tie_word_embeddings"] = model.config.tied
        return values
    head = model.abstract["head"]
    if model.kind == "reward" and head.get("bias") is not None:
        raise ExportError("a reward model with a bias in its head has no stock class: sequence classifiers have none")
    labels = head["kernel"].shape[-1]
    values["id2label"] = {str(label): f"LABEL_{label}" for label in range(labels)}
    values["label2id"] = {f"LABEL_{label}": label for label in range(labels)}
    if model.kind == "value":
        values["classifier_dropout"] = 0.0
    if values.get("pad_token_id") is None and tokenizer is not None:
        # A stock sequence classifier needs it to find the last real token of a batch.
        values["pad_token_id"] = tokenizer.pad_token_id
    return values


def _generation(
    values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """generation_config.json: what was given, completed with every known end token."""
    result = dict(given or {})
    ends: list[int] = []
    for ids in (result.get("eos_token_id"), values.get("eos_token_id"), getattr(tokenizer, "eos_token_id", None)):
        ends += ids if isinstance(ids, list) else [] if ids is None else [ids]
    ends = list(dict.fromkeys(ends))
    if ends:
        result["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    for key in ("bos_token_id", "pad_token_id"):
        value = result.get(key, values.get(key))
        value = getattr(tokenizer, key, None) if value is None else value
        if value is not None:
            result[key] = value
    return result


def _check_free(out: Path, force: bool) -> None:
    if not out.exists() or force:
        return
    if not out.is_dir():
        raise ExportError(f"{out} is a file; give the name of a folder")
    if any(out.iterdir()) and not _is_export(out):
        raise ExportError(f"{out} is not empty and not an earlier export; give another folder, or force to replace it")


def _is_export(folder: Path) -> bool:
    for file in folder.glob("model*.safetensors"):
        try:
            with safe_open(file, "numpy") as handle:
                return (handle.metadata() or {}).get("written_by") == _MARK["written_by"]
        except (SafetensorError, OSError):
            return False
    return False


def _sizes(leaves: list[Leaf], dtype: str) -> list[tuple[str, int]]:
    """Name and bytes of every checkpoint tensor, in the order they are written."""
    itemsize = jax.numpy.dtype(dtype).itemsize
    return [(names[0], math.prod(leaf.inner) * itemsize) for leaf in leaves for names in leaf.names]


def _tensors(leaves: list[Leaf], params: Params, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Every checkpoint tensor in Hugging Face layout, fetched one at a time."""
    flat = dict(flatten(params))
    for leaf in leaves:
        for layer, names in enumerate(leaf.names):
            value = flat[leaf.path]
            value = value[layer] if leaf.stacked else value
            if not getattr(value, "is_fully_addressable", True):
                value = multihost_utils.process_allgather(value, tiled=True)
            host = np.asarray(value).astype(jax.numpy.dtype(dtype))
            yield names[0], np.ascontiguousarray(leaf.layout.to_hf(host))


def _write_tensors(folder: Path, leaves: list[Leaf], params: Params, dtype: str, shard_bytes: int) -> None:
    sizes = _sizes(leaves, dtype)
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes:
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    tensors = _tensors(leaves, params, dtype)
    mode = folder.stat().st_mode & 0o666
    for file, names in zip(files, shards, strict=True):
        save_file(dict(next(tensors) for _ in names), folder / file, metadata=_MARK)
        (folder / file).chmod(mode)  # the library makes them private
    if count > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        total = sum(size for _, size in sizes)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.save_pretrained(folder)
    # transformers 5 names its generic class so; the older name is read by every version.
    config = folder / "tokenizer_config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    if values.get("tokenizer_class") == "TokenizersBackend":
        _write_json(config, values | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _move_into_place(partial: Path, out: Path) -> None:
    """Renames the finished folder; an earlier one is set aside first and removed last."""
    if not out.exists():
        partial.rename(out)
        return
    aside = _beside(out, "old")
    os.replace(out, aside / out.name)
    partial.rename(out)
    shutil.rmtree(aside)


def _beside(out: Path, purpose: str) -> Path:
    """A new hidden folder on the same file system, so that renaming is atomic."""
    folder = out.parent / f".{out.name}.{purpose}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return folder
