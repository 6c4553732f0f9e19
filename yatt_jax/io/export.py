"""Writing stock Hugging Face folders: what transformers and vLLM load without knowing where it came from."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from yatt_jax.io.model_card import model_card
from yatt_jax.io.safetensors_folder import INDEX, SINGLE
from yatt_jax.io.tensor_files import (
    DTYPES,
    MARK,
    TensorFile,
    check_written,
    owners,
    plan_files,
    tensor_shapes,
    weight_map,
    write_tensors,
)
from yatt_jax.io.tensors import ExportError
from yatt_jax.models.build import Model
from yatt_jax.models.families import family
from yatt_jax.models.names import leaves_of
from yatt_jax.types import Params

__all__ = ["ExportError", "Hosts", "save_folder"]

# A folder that one machine makes on a network file system may take so many seconds to show on the others.
_APPEARS_WITHIN = 10.0


class Hosts(Protocol):
    """How the processes of a job agree."""

    def gather(self, name: str, value: Any) -> Sequence[Any]:
        """Exchanges a small JSON value: those of all processes, in their order. A wait for all of them as well."""
        ...


class _Devices:
    """Agreement on a short text or None by a device collective."""

    def gather(self, name: str, value: Any) -> Sequence[Any]:
        own = np.zeros(1000, np.uint8)
        text = (value or "").encode()[: own.size]
        own[: len(text)] = list(text)
        rows = multihost_utils.process_allgather(own)
        return [bytes(row).rstrip(b"\0").decode(errors="replace") or None for row in rows]


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
    run: Mapping[str, Any] | None = None,
    force: bool = False,
    hosts: Hosts | None = None,
) -> Path:
    """Writes a model as a stock folder, all of it or nothing.

    A language model is written as such, a critic as a token-classification and a reward model as a
    sequence-classification folder. Tied weights are written once.

    Every process of the job must call it, and each writes its share of the tensors: see ``tensor_files``. The folder
    must lie where all of them see it. It is made beside its place under another name, and takes its place when it is
    whole; until then, and after any failure, what was there before is untouched.

    Args:
      out_dir: the folder. An earlier export at that place is replaced.
      model: what the parameters belong to.
      params: the parameters, in any sharding.
      hf_config: config.json of the folder the model came from, or ``families.to_hf`` of a model made here.
      tokenizer: written beside the weights, with its chat template; None leaves it out.
      dtype: of the tensors in the files: "float32", "bfloat16" or "float16".
      shard_bytes: size a safetensors file may have; more tensors go to further files, with an index.
      generation_config: generation_config.json of a language model; end tokens of tokenizer and config by default.
      run: what the model card says of the training; see ``model_card.run_card``.
      force: replace a folder that is not an earlier export.
      hosts: how processes agree; by default through the devices, without a time limit.

    Returns:
      The folder.

    Raises:
      ExportError: the folder holds something else, the model does not fit ``hf_config``, or it cannot be written: a
        full disk, or a folder that not all processes see.
    """
    out = _local(out_dir)
    chosen = family(hf_config.get("model_type"))
    leaves = leaves_of(chosen.names, model.abstract)
    values = _config(model, dict(hf_config), tokenizer, dtype)
    if chosen.from_hf(values).vocab != model.config.vocab:
        raise ExportError(f"{out}: hf_config has vocab_size {values['vocab_size']}, and the model {model.config.vocab}")
    if model.kind in chosen.not_stock:
        what = {"value": "critic", "reward": "reward model"}[model.kind]
        warnings.warn(
            f"{out}: transformers has no class for a {chosen.model_type} {what}; yatt_jax reads it",
            stacklevel=2,
        )
    files = plan_files(tensor_shapes(leaves), dtype, owners(params), shard_bytes)
    partial = _beside(out, "partial")

    def write_rest() -> None:
        check_written(partial, files)
        _write_index(partial, files)
        _write_json(partial / "config.json", values)
        if model.kind == "lm":
            _write_json(partial / "generation_config.json", _generation(values, tokenizer, generation_config))
        if tokenizer is not None:
            _write_tokenizer(partial, tokenizer)
        (partial / "README.md").write_text(model_card(out.name, model, values, dtype, run), encoding="utf-8")
        _move_into_place(partial, out)

    together = _Together(out, hosts or _Devices())
    try:
        together.first("prepared", lambda: _prepare(out, partial, force))
        together.all("seen by all", lambda: _await_folder(partial))
        together.all("written", lambda: write_tensors(partial, files, leaves, params, dtype))
        together.first("in place", write_rest)
    except BaseException:
        if jax.process_index() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


class _Together:
    """Steps that all processes take together: where one fails, all of them raise."""

    def __init__(self, out: Path, hosts: Hosts):
        self._out, self._hosts = out, hosts

    def first(self, name: str, step: Callable[[], object]) -> None:
        """A step of the first process, which the others wait for."""
        self.all(name, step if jax.process_index() == 0 else lambda: None)

    def all(self, name: str, step: Callable[[], object]) -> None:
        """A step of every process.

        Raises:
          ExportError: it failed here or elsewhere.
        """
        error: Exception | None = None
        try:
            step()
        except Exception as caught:
            error = _explained(caught, self._out)
        told = self._hosts.gather(f"export {name}", None if error is None else str(error) or repr(error))
        if error is not None:
            raise error
        for process, text in enumerate(told):
            if text is not None:
                raise ExportError(
                    f"{self._out}: nothing was exported, as process {process} could not do its share: {text}"
                )


def _explained(error: Exception, out: Path) -> Exception:
    """What a disk has to say, as a message to the user; other errors as they are."""
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if full or "os error 28" in str(error):  # as the tokenizer library says it
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(out.parent).free / 2**20:.1f} MiB free)"
        text = f"{out}: the disk is full{free}; nothing was exported: free some space, or use another folder"
    elif isinstance(error, OSError):
        text = f"{out}: nothing was exported: {error.filename or 'a file of it'}: {error.strerror or error}"
    else:
        return error
    explained = ExportError(text)
    explained.__cause__ = error
    return explained


def _local(path: str | Path) -> Path:
    if "://" in str(path):
        raise ExportError(f"{path}: an export is a local or mounted folder, not a URL")
    return Path(path)


def _prepare(out: Path, partial: Path, force: bool) -> None:
    """Makes the folder that is written to, and clears away what a killed export has left."""
    aside = _beside(out, "old")
    if aside.exists():
        if not out.exists():
            os.rename(aside / out.name, out)
        shutil.rmtree(aside)
    _check_free(out, force)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _await_folder(folder: Path) -> None:
    """Waits for what the first process has made to show here."""
    end = time.monotonic() + _APPEARS_WITHIN
    while not folder.is_dir():
        if time.monotonic() > end:
            raise ExportError(
                f"process {jax.process_index()} does not see {folder}, which process 0 has made: export to a folder "
                "on a file system that all processes share"
            )
        time.sleep(0.1)


def _config(
    model: Model, values: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, dtype: str
) -> dict[str, Any]:
    """config.json of the kind of model that is written."""
    if dtype not in DTYPES:
        raise ExportError(f"dtype = {dtype!r}: {', '.join(DTYPES)} can be written")
    for key in ("dtype", "_name_or_path", "id2label", "label2id", "num_labels", "problem_type", "classifier_dropout"):
        values.pop(key, None)
    for key, part in values.items():
        if key.endswith("_config") and isinstance(part, Mapping):
            values[key] = {k: v for k, v in part.items() if k not in ("dtype", "torch_dtype")}
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
    text = values.get("text_config", values)
    if text.get("pad_token_id") is None and tokenizer is not None:
        # A stock sequence classifier needs it to find the last real token of a batch.
        text["pad_token_id"] = tokenizer.pad_token_id
    return values


def _generation(
    values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """generation_config.json: what was given, completed with every known end token."""
    result = dict(given or {})
    values = {**(values.get("text_config") or {}), **{key: v for key, v in values.items() if v is not None}}
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
        raise ExportError(
            f"{out} is not empty and not an earlier export; give another folder, or replace it with --force"
        )


def _is_export(folder: Path) -> bool:
    for file in folder.glob("model*.safetensors"):
        try:
            with safe_open(file, "numpy") as handle:
                return (handle.metadata() or {}).get("written_by") == MARK["written_by"]
        except (SafetensorError, OSError):
            return False
    return False


def _write_index(folder: Path, files: Sequence[TensorFile]) -> None:
    if [file.name for file in files] != [SINGLE]:
        total = sum(file.size - len(file.header) for file in files)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map(files)})


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
        os.rename(partial, out)
        return
    aside = _beside(out, "old")
    aside.mkdir()
    os.rename(out, aside / out.name)
    try:
        os.rename(partial, out)
    except OSError:
        os.rename(aside / out.name, out)
        aside.rmdir()
        raise
    shutil.rmtree(aside)


def _beside(out: Path, purpose: str) -> Path:
    """A hidden name on the same file system, so that renaming is atomic; the same in every process."""
    return out.parent / f".{out.name}.{purpose}"
