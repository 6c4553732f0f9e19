"""Models from Hugging Face folders and GGUF files, each tensor read by slices straight into its sharding."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from yatt_jax.io.gguf import GgufTensors, hf_config
from yatt_jax.io.gguf_file import GgufFile
from yatt_jax.io.safetensors_folder import SafetensorsFolder, read_json
from yatt_jax.io.tensors import CheckpointError, TensorSource
from yatt_jax.models.build import Kind, Model, assemble, build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.families import family, from_hf, own
from yatt_jax.models.hf_config import ConfigError
from yatt_jax.models.names import Family, Leaf, flatten, leaves_of, unflatten
from yatt_jax.parallel.partition import Partition
from yatt_jax.types import Params

__all__ = ["CheckpointError", "ModelFolder", "Progress", "load_model", "read_folder", "scalar_head"]

# Called as progress(tensors read, tensors in all, name of the last one).
Progress = Callable[[int, int, str], None]

_HEAD_WEIGHTS = ("score.weight", "classifier.weight")
_HEAD_BIASES = ("score.bias", "classifier.bias")


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A model on disk, its weights unread.

    Attributes:
      path: the folder or .gguf file.
      hf_config: config.json, or what a GGUF file's metadata amounts to.
      model_type: the family.
      config: the decoder.
      architectures: transformers classes that the folder names.
      generation_config: generation_config.json; empty where there is none.
    """

    path: Path
    hf_config: dict[str, Any]
    model_type: str
    config: DecoderConfig
    architectures: tuple[str, ...]
    generation_config: dict[str, Any]


def read_folder(path: str | Path) -> ModelFolder:
    """Reads the configuration of a model, and no weights.

    Args:
      path: Hugging Face folder or .gguf file.

    Raises:
      CheckpointError: no such folder or file, no config.json, or a config that cannot be followed (the key is named).
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return _model_folder(path, hf_config(GgufFile(path)), {})
    if path.is_file():
        raise CheckpointError(f"{path}: a file that is not a .gguf; give its folder, or a .gguf file")
    if not path.is_dir():
        what = "no such file" if path.suffix == ".gguf" else "no such folder"
        raise CheckpointError(f"{path}: {what}; a model is a Hugging Face folder or a .gguf file")
    config_file = path / "config.json"
    if not config_file.is_file():
        raise CheckpointError(f"{path}: no config.json, so this is not a Hugging Face model folder")
    generation = path / "generation_config.json"
    return _model_folder(path, read_json(config_file), read_json(generation) if generation.is_file() else {})


def _model_folder(path: Path, values: dict[str, Any], generation: dict[str, Any]) -> ModelFolder:
    file = path if path.is_file() else path / "config.json"
    try:
        values = own(values)
        config = from_hf(values)
    except (ConfigError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    architectures = tuple(values.get("architectures") or ())
    return ModelFolder(path, values, values["model_type"], config, architectures, generation)


def scalar_head(folder: ModelFolder) -> tuple[int, bool] | None:
    """Outputs of a classification folder's head and whether it has a bias; None for a language model.

    Raises:
      CheckpointError: a classification folder without its head, or files that cannot be read.
    """
    return _head_shape(folder, _open(folder), "reward")


def load_model(
    path: str | Path,
    kind: Kind,
    partition: Partition,
    *,
    dtype: str = "float32",
    compute_dtype: str = "float32",
    remat: str = "none",
    attention: str = "auto",
    labels: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Model, Params]:
    """Reads a model into its sharding.

    A critic or reward model may start from a language model (the critic's head is then zero, the reward model's
    drawn from N(0, 1/sqrt(D + 1)) without bias), or from a classification folder, whose head is read; a critic takes
    the head of a folder with one label.

    Args:
      path: Hugging Face folder or .gguf file.
      kind: "lm", "value" or "reward".
      partition: where the parameters go. Each process reads the parts of its own devices.
      dtype: of the parameters.
      compute_dtype: of activations.
      remat: see ``DecoderConfig.remat``.
      attention: see ``DecoderConfig.attention``.
      labels: outputs of a reward model without a bias, whatever the folder holds; by default those of its head, or one.
      seed: of a reward head that must be drawn.
      progress: called after each tensor.

    Returns:
      The model and its parameters.

    Raises:
      CheckpointError: anything missing, unknown, misshapen or unreadable; the message names file and tensor.
    """
    folder = read_folder(path)
    config = dataclasses.replace(folder.config, dtype=compute_dtype, remat=remat, attention=attention)
    source = _open(folder)
    head = _head_shape(folder, source, kind)
    options: dict[str, Any] = {"labels": head[0], "bias": head[1]} if head and kind == "reward" else {}
    if labels is not None:
        if options not in ({}, {"labels": labels, "bias": False}):
            raise CheckpointError(
                f"{folder.path}: its head has {options['labels']} outputs{' and a bias' if options['bias'] else ''}, "
                f"and the reward model that is to be trained has {labels} and no bias; start from a language model, or "
                "from a reward model like it"
            )
        options = {"labels": labels}
    model = build(kind, config, dtype, **options)
    leaves = leaves_of(family(folder.model_type).names, model.abstract)
    fresh = () if head and (kind == "reward" or head[0] == 1) else ("head/kernel", "head/bias")
    if head and not head[1]:
        fresh += ("head/bias",)
    wanted = [leaf for leaf in leaves if leaf.path not in fresh]
    found = _match(wanted, source, family(folder.model_type), kind, config.tied, str(folder.path))
    shardings = dict(flatten(model.shardings(partition)))
    reader = _Reader(source, sum(len(names) for names in found.values()), progress)
    params = {}
    for leaf in leaves:
        if leaf.path in found:
            params[leaf.path] = reader.read(leaf, found[leaf.path], dtype, shardings[leaf.path])
        else:
            params[leaf.path] = model.draw(leaf.path, seed, dtype, shardings[leaf.path])
    return model, unflatten(params)


def _open(folder: ModelFolder) -> TensorSource:
    if folder.path.is_file():
        return GgufTensors(GgufFile(folder.path), folder.hf_config)
    return SafetensorsFolder(folder.path)


def _head_shape(folder: ModelFolder, source: TensorSource, kind: Kind) -> tuple[int, bool] | None:
    """Labels of the checkpoint's scalar head and whether it has a bias; None for a language model."""
    names = source.names()
    weight = next((name for name in _HEAD_WEIGHTS if name in names), None)
    classifier = any(a.endswith("Classification") for a in folder.architectures)
    if kind == "lm":
        if weight is not None or classifier:
            raise CheckpointError(
                f"{folder.path}: a {'/'.join(folder.architectures) or 'classification'} holds no language model; "
                f"give a folder whose architecture is {family(folder.model_type).architectures['lm']}"
            )
        return None
    if weight is None:
        if classifier:
            raise CheckpointError(f"{folder.path}: tensor score.weight is missing from a classification folder")
        return None
    labels = source.shape(weight)[0]
    if kind == "value" and labels != 1:
        warnings.warn(
            f"{folder.path}: the head has {labels} labels and a critic has one, so its head starts at zero",
            stacklevel=3,
        )
    return labels, any(name in names for name in _HEAD_BIASES)


def _match(
    leaves: Sequence[Leaf], source: TensorSource, chosen: Family, kind: Kind, tied: bool, where: str
) -> dict[str, tuple[str, ...]]:
    """Finds every tensor that is wanted, and refuses what is missing, unknown or misshapen.

    Returns:
      The checkpoint tensors of each parameter, by path.
    """
    names = set(source.names())
    found: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    for leaf in leaves:
        expected = leaf.layout.hf_shape(leaf.inner)
        own = []
        for spellings in leaf.names:
            name = next((n for n in spellings if n in names), None)
            if name is None:
                problems.append(f"tensor {spellings[0]} is missing")
                continue
            own.append(name)
            shape = source.shape(name)
            if shape != expected:
                problems.append(f"tensor {name} in {source.file_of(name)} has shape {shape}, not {expected}")
        found[leaf.path] = tuple(own)
    unknown = names - {name for spelled in found.values() for name in spelled}
    embedding = next(iter(found.get("decoder/embedding", ())), "")
    for name in sorted(unknown):
        if not name.startswith(chosen.unread) and not _benign(name, embedding, source, kind, tied):
            problems.append(f"tensor {name} in {source.file_of(name)} is unknown to the family")
    if problems:
        shown = "\n  ".join(problems[:8]) + (f"\n  and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(
            f"{where}: the weights do not fit config.json; check that both belong to the same model, and that no "
            f"file is missing\n  {shown}"
        )
    return found


def _benign(name: str, embedding: str, source: TensorSource, kind: Kind, tied: bool) -> bool:
    """Whether a tensor may be left unread: rotary buffers, heads that are not used, a copy of a tied matrix."""
    if name.endswith("rotary_emb.inv_freq") or (name in (*_HEAD_WEIGHTS, *_HEAD_BIASES) and kind == "value"):
        return True
    if not name.endswith("lm_head.weight"):
        return False
    if kind != "lm":
        return True
    if not tied or not embedding:
        return False
    rows, width = source.shape(name)
    if source.shape(embedding) != (rows, width):
        return False
    step = max(1, (1 << 24) // width)
    for start in range(0, rows, step):
        part = (slice(start, min(start + step, rows)), slice(0, width))
        if not np.array_equal(source.read(name, part), source.read(embedding, part)):
            raise CheckpointError(
                f"{source.file_of(name)}: tensor {name} differs from {embedding}, and config.json says "
                f"tie_word_embeddings = true; set it to false to use both"
            )
    return True


class _Reader:
    """Reads parameters into their sharding and counts the tensors read."""

    def __init__(self, source: TensorSource, total: int, progress: Progress | None):
        self._source, self._total, self._progress = source, total, progress
        self._seen: set[str] = set()

    def read(self, leaf: Leaf, names: Sequence[str], dtype: str, sharding: jax.sharding.Sharding) -> jax.Array:
        """One parameter; a host holds its own devices' parts of one parameter at a time."""
        return assemble(leaf.shape, sharding, lambda slices: self._part(leaf, names, dtype, slices))

    def _part(self, leaf: Leaf, names: Sequence[str], dtype: str, slices: tuple[slice, ...]) -> np.ndarray:
        result = np.empty([s.stop - s.start for s in slices], jax.numpy.dtype(dtype))
        inner = slices[1:] if leaf.stacked else slices
        wanted = names[slices[0]] if leaf.stacked else names
        for layer, name in enumerate(wanted):
            target = result[layer] if leaf.stacked else result
            try:
                piece = self._source.read(name, leaf.layout.hf_slices(inner, leaf.inner))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{self._source.file_of(name)}: tensor {name} cannot be read: {error}") from error
            target[...] = leaf.layout.from_hf(piece, target.shape)
            self._count(name)
        return result

    def _count(self, name: str) -> None:
        if name not in self._seen:
            self._seen.add(name)
            if self._progress is not None:
                self._progress(len(self._seen), self._total, name)
