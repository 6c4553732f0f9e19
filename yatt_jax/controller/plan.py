"""What a run will do, worked out and checked before a weight is read or a program compiled."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from transformers import PreTrainedTokenizerFast

from yatt_jax.config import Config, ConfigError, InitConfig, load_algo, to_dict
from yatt_jax.data import tokenizer as tokenizers
from yatt_jax.errors import nearest
from yatt_jax.io import hf
from yatt_jax.models import families
from yatt_jax.models.build import Model, build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.parallel import memory
from yatt_jax.parallel.fill import PackShape, pack_shape, rounded
from yatt_jax.parallel.local import job_devices, sampling_group
from yatt_jax.parallel.partition import Partition, axis_faults, divisors, make_partitions
from yatt_jax.rollout.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Room:
    """Room for rows on one data shard: ``slots`` rows, and the packs that they are computed in."""

    slots: int
    shape: PackShape


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked run: the config with everything that follows from it.

    Attributes:
      algo: the algorithm's module.
      train: partition for scoring and updates.
      rollout: partition for sampling.
      tokenizer: of the actor.
      stop_token_ids: ids that end a response.
      hf_config: the actor's config.json, kept for the export.
      generation_config: its generation_config.json, if it has one.
      models: role -> the static half of its model.
      paths: role -> folder or file its weights come from; "" for fresh weights or another role's.
      record_kept: whether sampling records the support that its filters leave.
      rows: rows of a step.
      row_tokens: length of all rows' arrays: the longest possible row, rounded up.
      minibatch_rows: rows of a minibatch.
      minibatch: room for them.
      scored: room for all rows of a step, to score them.
      updates: optimizer steps of each role in the whole run.
    """

    config: Config
    algo: types.ModuleType
    train: Partition
    rollout: Partition
    tokenizer: PreTrainedTokenizerFast
    stop_token_ids: tuple[int, ...]
    hf_config: dict[str, Any]
    generation_config: dict[str, Any] | None
    models: dict[str, Model]
    paths: dict[str, str]
    record_kept: bool
    rows: int
    row_tokens: int
    minibatch_rows: int
    minibatch: Room
    scored: Room
    updates: dict[str, int]

    def memory(self) -> list[memory.Entry]:
        """Bytes a device holds, by role."""
        config = self.config
        tokens = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
        entries: list[memory.Entry] = []
        for role, model in self.models.items():
            trained = role in self.algo.TRAINS
            shape = decoder_shape(model.config)
            found = memory.weights(role, model.abstract, model.shardings(self.train), trained=trained)
            entries += [self._parked(entry) for entry in found]
            if trained:
                packs = self.minibatch.shape.large
                chunk = config.train.vocab_chunk if model.kind == "lm" else 0
                entries += memory.activations(role, shape, packs.packs, packs.length, chunk, self.train)
        actor = self.models["actor"]
        if actor.shardings(self.train) != actor.shardings(self.rollout):
            held = memory.bytes_per_device(actor.abstract, actor.shardings(self.rollout))
            phase = "always" if config.parallel.sampling_copy == "keep" else "rollout"
            entries.append(memory.Entry("actor", "weights laid out for sampling", held, phase))
        sampled = config.rollout.rows or self.rows
        entries.append(memory.cache(decoder_shape(actor.config), sampled, tokens, self.rollout))
        return entries

    def _parked(self, entry: memory.Entry) -> memory.Entry:
        """The entry, needed for training alone where it is parked during sampling."""
        park = self.config.parallel.park
        moments = entry.what == "optimizer moments" and park != "none"
        return (
            dataclasses.replace(entry, phase="train")
            if moments or (park == "all" and entry.role != "actor" and entry.phase == "always")
            else entry
        )

    def describe(self) -> str:
        """What ``--dry_run`` prints: the resolved config, the models, memory by role and the shape of a step."""
        config, gib = self.config, 2**30
        sizes = {"train": self.train.split, "rollout": self.rollout.split}
        resolved = to_dict(config)
        resolved["parallel"] |= to_dict(sizes)
        lines = [json.dumps(resolved, indent=2, ensure_ascii=False), "", "models"]
        for role, model in self.models.items():
            source = self.paths[role] or "fresh or copied"
            lines.append(f"  {role:<10} {model.parameter_count:>15,} parameters   {model.kind:<6} {source}")
        entries = self.memory()
        lines += ["", f"memory on each of {self.train.mesh.size} devices, GiB"]
        lines += [f"  {e.role:<10} {e.bytes / gib:>9.3f}  {e.what} ({e.phase})" for e in entries]
        lines += [f"  peak in {phase:<8} {held / gib:>9.3f}" for phase, held in memory.peak(entries).items()]
        sampling = config.rollout.sampling
        per_rollout = config.hyper.epochs * config.hyper.minibatches
        packs = self.minibatch.shape.large
        lines += [
            "",
            f"a step of {config.steps}",
            f"  prompts {config.rollout.prompts} x {config.rollout.samples_per_prompt} samples = {self.rows} rows, "
            f"up to {config.data.max_prompt_tokens} + {sampling.max_new_tokens} tokens each",
            f"  {per_rollout} updates of {self.minibatch_rows} rows in micro-batches of {packs.packs} packs of "
            f"{packs.length} tokens on each of {self.train.row_shards} data shards",
            f"  train {_split(self.train)}; rollout {_split(self.rollout)}",
        ]
        return "\n".join(lines)


def _split(partition: Partition) -> str:
    return " x ".join(f"{k} {v}" for k, v in dataclasses.asdict(partition.split).items())


def decoder_shape(config: DecoderConfig) -> memory.DecoderShape:
    """The sizes that the memory model reads."""
    names = [f.name for f in dataclasses.fields(memory.DecoderShape)]
    sizes = {name: getattr(config, name) for name in names if name not in ("itemsize", "remat")}
    return memory.DecoderShape(**sizes, itemsize=jnp.dtype(config.dtype).itemsize, remat=config.remat == "full")


def make_plan(config: Config) -> Plan:
    """Works a run out and checks it: files exist, axes divide, sizes fit together. Reads no weights.

    Raises:
      ConfigError: with every fault that was found.
      InputError: a file that cannot be read.
    """
    algo = load_algo(config.algo)
    tokenizer = tokenizers.load_tokenizer(config.model.tokenizer or _require_model(config))
    roles = needed_roles(algo, config.hyper)
    hf_config, generation_config, models, paths = _models(config, tokenizer, roles)
    try:
        sizes = {model.config.kv_heads for model in models.values()}
        devices = job_devices()
        train, rollout = make_partitions(config.parallel.train, config.parallel.rollout, devices, kv_heads=sizes)
        sampling_group(rollout)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    folder = Path(config.model.path) if config.model.path and Path(config.model.path).is_dir() else None
    own_stops = tokenizers.stop_token_ids(tokenizer, folder)
    stops = tuple(dict.fromkeys((*config.rollout.sampling.stop_token_ids, *own_stops)))
    rows = config.rollout.prompts * config.rollout.samples_per_prompt
    hyper = config.hyper
    faults = [*_check_axes(models, train, rollout), *_check_lengths(config, hf_config)]
    faults += [*algo.check(hyper, config.rollout.samples_per_prompt), *_check_metric(config), *_check_budget(config)]
    vocab = models["actor"].config.vocab
    faults += [
        f"config.rollout.sampling.stop_token_ids: {token} is not in the model's vocabulary of {vocab}"
        for token in config.rollout.sampling.stop_token_ids
        if token >= vocab
    ]
    if rows % hyper.minibatches:
        faults.append(
            f"config.hyper.minibatches = {hyper.minibatches} does not divide the {rows} rows of a step "
            f"(rollout.prompts x rollout.samples_per_prompt); one of {divisors(rows)} would"
        )
    if faults:
        raise ConfigError("\n".join(faults))
    minibatch_rows = rows // hyper.minibatches
    per_rollout = hyper.epochs * hyper.minibatches
    return Plan(
        config=config,
        algo=algo,
        train=train,
        rollout=rollout,
        tokenizer=tokenizer,
        stop_token_ids=stops,
        hf_config=hf_config,
        generation_config=generation_config,
        models=models,
        paths=paths,
        record_kept=config.rollout.filters_in_scoring == "auto" and _filters(config.rollout.sampling),
        rows=rows,
        row_tokens=_row_tokens(config),
        minibatch_rows=minibatch_rows,
        minibatch=_room(config, minibatch_rows, 0, train),
        scored=_room(config, rows, config.train.score_rows, train),
        updates={
            role: max(1, sum(role in algo.trains(hyper, step) for step in range(config.steps)) * per_rollout)
            for role in algo.TRAINS
        },
    )


def _row_tokens(config: Config) -> int:
    return rounded(config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens)


def _room(config: Config, rows: int, budget_rows: int, partition: Partition) -> Room:
    """Room for ``rows`` rows, in micro-batches of ``budget_rows`` of the longest (0: as ``config.train`` says)."""
    train, longest, shards = config.train, _row_tokens(config), partition.row_shards
    # With slots to spare, shards can take as many rows as make their costs even. An empty slot costs next to nothing.
    slots = rows if shards == 1 else math.ceil(rows * 5 / 4 / shards)
    budget = (budget_rows or train.micro_rows or slots) * longest
    if train.micro_tokens and not budget_rows:
        budget = train.micro_tokens
    # Nothing of the budget is left unused: packs are as long as the whole number that fits allows.
    length = train.pack_tokens or max(longest, budget // max(1, budget // longest) // 8 * 8)
    return Room(slots, pack_shape(budget, length, slots))


def _check_budget(config: Config) -> list[str]:
    """Every row must fit into a pack, and a pack into a micro-batch."""
    train, longest = config.train, _row_tokens(config)
    why = "(data.max_prompt_tokens + rollout.sampling.max_new_tokens, rounded up)"
    faults = [
        f"config.train.{name} = {value}: the longest possible row needs at least {longest} {why}"
        for name, value in (("micro_tokens", train.micro_tokens), ("pack_tokens", train.pack_tokens))
        if 0 < value < longest
    ]
    budget = train.micro_tokens or train.micro_rows * longest
    if not faults and 0 < budget < train.pack_tokens:
        faults.append(f"config.train.pack_tokens = {train.pack_tokens} is more than a micro-batch's {budget} tokens")
    return faults


def _require_model(config: Config) -> str:
    if not config.model.path:
        raise ConfigError(
            "config.model.tokenizer is empty, and so is config.model.path: name a tokenizer for the model from "
            "scratch, as 'characters:0123456789'"
        )
    return config.model.path


def needed_roles(algo: types.ModuleType, hyper: Any) -> tuple[str, ...]:
    """The roles whose weights a run holds, the actor first."""
    return ("actor", *sorted({*algo.TRAINS, *algo.scored_by(hyper)} - {"actor"}))


def _models(
    config: Config, tokenizer: PreTrainedTokenizerFast, roles: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Model], dict[str, str]]:
    """The static half of each role's model, and where its weights come from."""
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
    paths = {
        "actor": choice.path,
        "critic": choice.critic,
        "reference": choice.reference,
        "teacher": choice.teacher,
    }
    if "teacher" in roles and not choice.teacher:
        raise ConfigError("config.model.teacher is empty: name the folder of the model that the actor learns from")

    def shape(path: str) -> DecoderConfig:
        return dataclasses.replace(hf.read_folder(path).config, **compute) if path else decoder

    def make(role: str) -> Model:
        kind = "value" if role == "critic" else "lm"
        own = role == "actor"
        trained = own or role == "critic"
        dtype = choice.dtype if trained else choice.frozen_dtype
        return build(kind, decoder if own else shape(paths[role]), dtype)

    models = {role: make(role) for role in roles}
    for role, model in models.items():
        if model.config.vocab != decoder.vocab:
            raise ConfigError(
                f"config.model.{role}: its vocabulary has {model.config.vocab} entries and the actor's "
                f"{decoder.vocab}; roles must share one tokenizer"
            )
    return hf_config, generation_config, models, {role: paths[role] for role in roles}


def _fresh(sizes: InitConfig, tokenizer: PreTrainedTokenizerFast) -> tuple[DecoderConfig, dict[str, Any]]:
    """A decoder of the wanted sizes, with all else as its family has it, and its config.json."""
    names = [f.name for f in dataclasses.fields(DecoderConfig) if hasattr(sizes, f.name)]
    decoder = DecoderConfig(vocab=len(tokenizer), **{name: getattr(sizes, name) for name in names})
    try:
        written = families.to_hf(sizes.family, decoder, sizes.max_positions)
    except ValueError as error:
        raise ConfigError(f"config.model.init: {error}") from error
    return decoder, written | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


def _filters(sampling: Sampling) -> bool:
    return bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.min_new_tokens)


def _check_axes(models: dict[str, Model], train: Partition, rollout: Partition) -> list[str]:
    """What does not divide: every role is trained or scored in one partition, and the actor samples in the other."""
    found: dict[str, None] = {}
    for role, model in models.items():
        shape = model.config
        for partition in (train, rollout) if role == "actor" else (train,):
            faults = axis_faults(
                partition,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                mlp=shape.mlp,
                hidden=shape.hidden,
                whose="the model's" if shape == models["actor"].config else f"the {role}'s",
            )
            found |= dict.fromkeys(faults)
    return list(found)


def _check_metric(config: Config) -> list[str]:
    """The metric that decides which checkpoints stay must be one that the evaluation measures."""
    wanted = config.checkpoint.best_metric
    known = ["reward", "reward_invalid", "response_length", "ended", *(f"reward/{name}" for name in config.rewards)]
    known = [f"eval/{name}" for name in known]
    if not wanted or (wanted in known and config.evaluation.every):
        return []
    if wanted in known:
        return [f"config.checkpoint.best_metric = {wanted!r} needs config.evaluation.every above 0"]
    return [f"config.checkpoint.best_metric = {wanted!r}{nearest(wanted, known)}: expected one of {known}"]


def _check_lengths(config: Config, hf_config: dict[str, Any]) -> list[str]:
    total = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    limit = hf_config.get("max_position_embeddings") or 0
    if limit and total > limit:
        return [
            f"config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens = {total} is longer than the "
            f"model's {limit} positions"
        ]
    return []
