"""What every run plans: its roles, the static half of each one's model, and how the devices are split for them."""

from __future__ import annotations

import abc
import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from transformers import PreTrainedTokenizerFast

from yatt_jax.config import Config, ConfigError, InitConfig
from yatt_jax.data import tokenizer as tokenizers
from yatt_jax.errors import nearest
from yatt_jax.io import hf
from yatt_jax.models import families
from yatt_jax.models.build import Kind, Model, build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.parallel import memory
from yatt_jax.parallel.partition import Partition, axis_faults
from yatt_jax.typed import to_dict

KINDS: dict[str, Kind] = {"critic": "value", "reward": "reward"}  # the other roles are language models
FROZEN = ("reference", "teacher")
REWARD = "reward:"  # begins the roles of the models that reward samples


@dataclasses.dataclass(frozen=True)
class Plan(abc.ABC):
    """A checked run: the config with what follows from it for every kind of run.

    Attributes:
      algo: the algorithm's module.
      train: partition for scoring and updates.
      tokenizer: of the model that ``config.model.path`` names.
      hf_config: its config.json, kept for the export.
      generation_config: its generation_config.json, if it has one.
      models: role -> the static half of its model; the role that starts from ``config.model.path`` comes first.
      paths: role -> folder or file its weights come from; "" for fresh weights or another role's.
      updates: optimizer steps of each role in the whole run.
    """

    config: Config
    algo: types.ModuleType
    train: Partition
    tokenizer: PreTrainedTokenizerFast
    hf_config: dict[str, Any]
    generation_config: dict[str, Any] | None
    models: dict[str, Model]
    paths: dict[str, str]
    updates: dict[str, int]

    @property
    def first(self) -> str:
        """The role that starts from ``config.model.path`` and is exported: the actor, or the reward model."""
        return next(iter(self.models))

    def memory(self) -> list[memory.Entry]:
        """Bytes a device holds, by role."""
        entries: list[memory.Entry] = []
        for role, model in self.models.items():
            trained = role in self.algo.TRAINS
            entries += memory.weights(role, model.abstract, model.shardings(self.train), trained=trained)
            if trained:
                packs, length = self.micro_batch
                chunk = self.config.train.vocab_chunk if model.kind == "lm" else 0
                entries += memory.activations(role, decoder_shape(model.config), packs, length, chunk, self.train)
        return entries

    @property
    @abc.abstractmethod
    def micro_batch(self) -> tuple[int, int]:
        """The largest micro-batch of a data shard: sequences, and tokens of each."""

    @property
    def splits(self) -> dict[str, Partition]:
        """Phase -> partition."""
        return {"train": self.train}

    @abc.abstractmethod
    def step_lines(self) -> list[str]:
        """What ``describe`` says of a step."""

    def describe(self) -> str:
        """What ``--dry_run`` prints: the resolved config, the models, memory by role and the shape of a step."""
        gib = 2**30
        resolved = to_dict(self.config)
        resolved["parallel"] |= to_dict({name: partition.split for name, partition in self.splits.items()})
        lines = [json.dumps(resolved, indent=2, ensure_ascii=False), "", "models"]
        for role, model in self.models.items():
            source = self.paths[role] or "fresh or copied"
            lines.append(f"  {role:<10} {model.parameter_count:>15,} parameters   {model.kind:<6} {source}")
        entries = self.memory()
        lines += ["", f"memory on each of {self.train.mesh.size} devices, GiB"]
        lines += [f"  {e.role:<10} {e.bytes / gib:>9.3f}  {e.what} ({e.phase})" for e in entries]
        lines += [f"  peak in {phase:<8} {held / gib:>9.3f}" for phase, held in memory.peak(entries).items()]
        splits = "; ".join(f"{name} {_split(partition)}" for name, partition in self.splits.items())
        lines += ["", f"a step of {self.config.steps}", *(f"  {line}" for line in [*self.step_lines(), splits])]
        return "\n".join(lines)


def _split(partition: Partition) -> str:
    return " x ".join(f"{k} {v}" for k, v in dataclasses.asdict(partition.split).items())


def decoder_shape(config: DecoderConfig) -> memory.DecoderShape:
    """The sizes that the memory model reads."""
    names = [f.name for f in dataclasses.fields(memory.DecoderShape)]
    sizes = {name: getattr(config, name) for name in names if name not in ("itemsize", "remat")}
    return memory.DecoderShape(**sizes, itemsize=jnp.dtype(config.dtype).itemsize, remat=config.remat == "full")


def load_tokenizer(config: Config) -> PreTrainedTokenizerFast:
    """The tokenizer that the configuration names.

    Raises:
      ConfigError: it names none.
      InputError: one that cannot be read.
    """
    source = config.model.tokenizer or config.model.path
    if not source:
        raise ConfigError(
            "config.model.tokenizer is empty, and so is config.model.path: name a tokenizer for the model from "
            "scratch, as 'characters:0123456789'"
        )
    return tokenizers.load_tokenizer(source)


@dataclasses.dataclass(frozen=True)
class Roles:
    """The models of a run; see ``Plan``."""

    hf_config: dict[str, Any]
    generation_config: dict[str, Any] | None
    models: dict[str, Model]
    paths: dict[str, str]


def plan_roles(
    config: Config, tokenizer: PreTrainedTokenizerFast, roles: Sequence[str], trained: Sequence[str], labels: int = 1
) -> Roles:
    """The static half of each role's model, and where its weights come from.

    Args:
      config: the run.
      tokenizer: its length is the vocabulary of a model from scratch.
      roles: the first one starts from ``config.model.path``.
      trained: those of them that are trained.
      labels: outputs of a reward model.

    Raises:
      ConfigError: no teacher where there must be one, or models that do not fit together.
      InputError: a folder that cannot be read.
    """
    choice = config.model
    compute = {"dtype": choice.compute_dtype, "remat": choice.remat, "attention": choice.attention}
    if choice.path:
        source = hf.read_folder(choice.path)
        hf_config, generation_config = source.hf_config, source.generation_config or None
        decoder = dataclasses.replace(source.config, **compute)
    else:
        decoder, hf_config = _fresh(choice.init, tokenizer)
        generation_config = None
        decoder = dataclasses.replace(decoder, **compute)
    named = {"critic": choice.critic, "reference": choice.reference, "teacher": choice.teacher}
    paths = {role: named[role] if i else choice.path for i, role in enumerate(roles)}
    if "teacher" in roles and not choice.teacher:
        raise ConfigError("config.model.teacher is empty: name the folder of the model that the actor learns from")

    def make(role: str) -> Model:
        own = role == roles[0] or not paths[role]
        shape = decoder if own else dataclasses.replace(hf.read_folder(paths[role]).config, **compute)
        kind = KINDS.get(role, "lm")
        dtype = choice.dtype if role in trained else choice.frozen_dtype
        return build(kind, shape, dtype, **({"labels": labels} if kind == "reward" else {}))

    models = {role: make(role) for role in roles}
    for role, model in models.items():
        if model.config.vocab != decoder.vocab:
            raise ConfigError(
                f"config.model.{role}: its vocabulary has {model.config.vocab} entries and the {roles[0]}'s "
                f"{decoder.vocab}; roles must share one tokenizer"
            )
    return Roles(hf_config, generation_config, models, paths)


def _fresh(sizes: InitConfig, tokenizer: PreTrainedTokenizerFast) -> tuple[DecoderConfig, dict[str, Any]]:
    """A decoder of the wanted sizes, with all else as its family has it, and its config.json."""
    names = [f.name for f in dataclasses.fields(DecoderConfig) if hasattr(sizes, f.name)]
    decoder = DecoderConfig(vocab=len(tokenizer), **{name: getattr(sizes, name) for name in names})
    try:
        written = families.to_hf(sizes.family, decoder, sizes.max_positions)
    except ValueError as error:
        raise ConfigError(f"config.model.init: {error}") from error
    return decoder, written | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


def check_axes(models: dict[str, Model], partitions: Mapping[str, Sequence[Partition]]) -> list[str]:
    """What does not divide.

    Args:
      models: by role.
      partitions: of each role those that its weights lie in.
    """
    found: dict[str, None] = {}
    first = next(iter(models.values())).config
    for role, model in models.items():
        shape = model.config
        for partition in partitions[role]:
            faults = axis_faults(
                partition,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                mlp=shape.mlp,
                hidden=shape.hidden,
                whose="the model's" if shape == first else f"the {role}'s",
            )
            found |= dict.fromkeys(faults)
    return list(found)


def check_metric(config: Config, known: Sequence[str]) -> list[str]:
    """The metric that decides which checkpoints stay must be one that the evaluation measures."""
    wanted = config.checkpoint.best_metric
    if not wanted or (wanted in known and config.evaluation.every):
        return []
    if wanted in known:
        return [f"config.checkpoint.best_metric = {wanted!r} needs config.evaluation.every above 0"]
    return [f"config.checkpoint.best_metric = {wanted!r}{nearest(wanted, known)}: expected one of {list(known)}"]


def check_length(total: int, what: str, hf_config: dict[str, Any]) -> list[str]:
    """Whether the longest row, which the keys in ``what`` allow, has a place in the model."""
    limit = (hf_config.get("text_config") or hf_config).get("max_position_embeddings") or 0
    return [f"{what} = {total} is longer than the model's {limit} positions"] if limit and total > limit else []


def model_folder(config: Config) -> Path | None:
    """The folder that ``config.model.path`` names, if it is one."""
    return Path(config.model.path) if config.model.path and Path(config.model.path).is_dir() else None
