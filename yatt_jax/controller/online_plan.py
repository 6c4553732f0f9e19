"""What a run that samples will do, worked out and checked before a weight is read or a program compiled."""

from __future__ import annotations

import dataclasses
import types

from transformers import PreTrainedTokenizerFast

from yatt_jax.config import ConfigError, OnlineRun, load_algo
from yatt_jax.controller.figures import prompt_figures
from yatt_jax.controller.reward_models import PlannedReward, plan_reward_models
from yatt_jax.controller.roles import (
    Plan,
    Roles,
    check_axes,
    check_length,
    check_metric,
    decoder_shape,
    load_tokenizer,
    model_folder,
    plan_roles,
)
from yatt_jax.controller.spread import Room
from yatt_jax.data import tokenizer as tokenizers
from yatt_jax.parallel import memory
from yatt_jax.parallel.fill import rounded
from yatt_jax.parallel.local import job_devices, sampling_group
from yatt_jax.parallel.partition import Partition, divisors, make_partitions
from yatt_jax.rollout.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class OnlinePlan(Plan):
    """A checked run that samples.

    Attributes:
      rollout: partition for sampling.
      stop_token_ids: ids that end a response.
      record_kept: whether sampling records the support that its filters leave.
      answers: whether rows hold, beside what was sampled, the data's own answers.
      rows: rows of a step.
      sampled_rows: rows sampled at a time.
      row_tokens: length of all rows' arrays: the longest possible row, rounded up.
      minibatch_rows: rows of a minibatch.
      minibatch: room for them.
      scored: room for all rows of a step, to score them.
      reward_models: reward -> the model that it names, held under a role of its own.
    """

    config: OnlineRun
    rollout: Partition
    stop_token_ids: tuple[int, ...]
    record_kept: bool
    answers: bool
    rows: int
    sampled_rows: int
    row_tokens: int
    minibatch_rows: int
    minibatch: Room
    scored: Room
    reward_models: dict[str, PlannedReward]

    @property
    def micro_batch(self) -> tuple[int, int]:
        """The largest micro-batch of a data shard: packs, and tokens of each."""
        return self.minibatch.shape.large.packs, self.minibatch.shape.large.length

    @property
    def sampler(self) -> str:
        """The role that writes the responses which are trained on."""
        return getattr(self.algo, "SAMPLED_BY", "actor")

    @property
    def splits(self) -> dict[str, Partition]:
        """Phase -> partition."""
        return {"train": self.train, "rollout": self.rollout}

    def memory(self) -> list[memory.Entry]:
        """Bytes a device holds, by role."""
        config = self.config
        tokens = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
        entries = [self._parked(entry) for entry in super().memory()]
        actor, keeps = self.models["actor"], config.parallel.sampling_copy == "keep"
        for role in samplers(self.algo, config) if keeps else (self.sampler,):
            model = self.models[role]
            if model.shardings(self.train) != model.shardings(self.rollout):
                held = memory.bytes_per_device(model.abstract, model.shardings(self.rollout))
                phase = "always" if keeps else "rollout"
                entries.append(memory.Entry(role, "weights laid out for sampling", held, phase))
        shape = _cache_shape(config, decoder_shape(actor.config))
        entries.append(memory.cache(shape, self.sampled_rows, tokens, self.rollout))
        return entries

    def _parked(self, entry: memory.Entry) -> memory.Entry:
        """The entry, needed for training alone where it is parked during sampling."""
        park = self.config.parallel.park
        moments = entry.what == "optimizer moments" and park != "none"
        return (
            dataclasses.replace(entry, phase="train")
            if moments or (park == "all" and entry.role not in ("actor", self.sampler) and entry.phase == "always")
            else entry
        )

    def step_lines(self) -> list[str]:
        """What ``describe`` says of a step."""
        config, (packs, length) = self.config, self.micro_batch
        per_rollout = config.hyper.epochs * config.hyper.minibatches
        return [
            f"prompts {config.rollout.prompts} x {config.rollout.samples_per_prompt} samples = {self.rows} rows, "
            f"up to {config.data.max_prompt_tokens} + {config.rollout.sampling.max_new_tokens} tokens each",
            f"{per_rollout} updates of {self.minibatch_rows} rows in micro-batches of {packs} packs of "
            f"{length} tokens on each of {self.train.row_shards} data shards",
        ]


def make_online_plan(config: OnlineRun) -> OnlinePlan:
    """Works a run out and checks it: files exist, axes divide, sizes fit together. Reads no weights.

    Raises:
      ConfigError: with every fault that was found.
      InputError: a file that cannot be read.
    """
    algo = load_algo(config.algo)
    if in_iterations := _check_iterations(config) if hasattr(algo, "iteration_start") else []:
        raise ConfigError("\n".join(in_iterations))
    tokenizer = load_tokenizer(config)
    names = needed_roles(algo, config)
    roles = plan_roles(config, tokenizer, names, ("actor", *algo.TRAINS))
    models = roles.models
    judges = _plan_judges(config, tokenizer, roles)
    try:
        sizes = {model.config.kv_heads for model in models.values()}
        train, rollout = make_partitions(config.parallel.train, config.parallel.rollout, job_devices(), kv_heads=sizes)
        sampling_group(rollout)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    own_stops = tokenizers.stop_token_ids(tokenizer, model_folder(config))
    stops = tuple(dict.fromkeys((*config.rollout.sampling.stop_token_ids, *own_stops)))
    rows = config.rollout.prompts * config.rollout.samples_per_prompt
    hyper = config.hyper
    answers = hasattr(algo, "ANSWERS")
    lies_in = {role: (train, rollout) if role in samplers(algo, config) else (train,) for role in models}
    longest = _row_tokens(config, answers)
    total = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    what = "config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens"
    faults = [*check_axes(models, lies_in), *check_length(total, what, roles.hf_config)]
    faults += [*algo.check(hyper, config.rollout.samples_per_prompt), *check_metric(config, _figures(config))]
    faults += _check_budget(config, longest)
    vocab = models["actor"].config.vocab
    faults += [
        f"config.rollout.sampling.stop_token_ids: {token} is not in the model's vocabulary of {vocab}"
        for token in config.rollout.sampling.stop_token_ids
        if token >= vocab
    ]
    faults += _check_stale(config)
    drawn = (config.rollout.prompts + config.rollout.extra_prompts) * config.rollout.samples_per_prompt
    sampled, too_small = _sampled_rows(config, drawn, decoder_shape(models["actor"].config), rollout)
    faults += too_small
    if rows % hyper.minibatches:
        faults.append(
            f"config.hyper.minibatches = {hyper.minibatches} does not divide the {rows} rows of a step "
            f"(rollout.prompts x rollout.samples_per_prompt); one of {divisors(rows)} would"
        )
    if faults:
        raise ConfigError("\n".join(faults))
    minibatch_rows = rows // hyper.minibatches
    per_rollout = hyper.epochs * hyper.minibatches
    return OnlinePlan(
        config=config,
        algo=algo,
        train=train,
        rollout=rollout,
        tokenizer=tokenizer,
        stop_token_ids=stops,
        **vars(roles),
        record_kept=config.rollout.filters_in_scoring == "auto" and _filters(config.rollout.sampling) and not answers,
        answers=answers,
        rows=rows,
        sampled_rows=sampled,
        row_tokens=longest,
        minibatch_rows=minibatch_rows,
        minibatch=_room(config, longest, minibatch_rows, 0, train),
        scored=_room(config, longest, rows, config.train.score_rows, train),
        reward_models=judges,
        updates={
            role: max(1, sum(role in algo.trains(hyper, step) for step in range(config.steps)) * per_rollout)
            for role in algo.TRAINS
        },
    )


def _plan_judges(config: OnlineRun, tokenizer: PreTrainedTokenizerFast, roles: Roles) -> dict[str, PlannedReward]:
    """The reward models, which are entered among the roles."""
    choice, vocab = config.model, roles.models["actor"].config.vocab
    compute = {"dtype": choice.compute_dtype, "remat": "none", "attention": choice.attention}
    row_tokens, dtype = _row_tokens(config, answers=False), choice.frozen_dtype
    judges = plan_reward_models(config.rewards, tokenizer, vocab, row_tokens, param_dtype=dtype, compute=compute)
    for judge in judges.values():
        roles.models[judge.role] = judge.model
        roles.paths[judge.role] = judge.spec.path
    return judges


def _row_tokens(config: OnlineRun, answers: bool) -> int:
    one = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    return rounded(2 * one if answers else one)


def _room(config: OnlineRun, longest: int, rows: int, budget_rows: int, partition: Partition) -> Room:
    """Room for ``rows`` rows, in micro-batches of ``budget_rows`` of the longest (0: as ``config.train`` says)."""
    train = config.train
    budget = (
        train.micro_tokens if train.micro_tokens and not budget_rows else (budget_rows or train.micro_rows) * longest
    )
    return Room.make(rows, longest, budget, train.pack_tokens, partition)


def _cache_shape(config: OnlineRun, shape: memory.DecoderShape) -> memory.DecoderShape:
    """The shape with the size of a number in the cache."""
    sizes = {"auto": shape.itemsize, "float32": 4, "bfloat16": 2}
    return dataclasses.replace(shape, itemsize=sizes[config.rollout.cache_dtype])


def _sampled_rows(
    config: OnlineRun, rows: int, shape: memory.DecoderShape, partition: Partition
) -> tuple[int, list[str]]:
    """Rows that are sampled at a time, and why there is no room for any."""
    budget = config.rollout.cache_gib * 2**30
    if not budget:
        return config.rollout.rows or rows, []
    tokens = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    one = memory.cache(_cache_shape(config, shape), partition.row_shards, tokens, partition).bytes
    most = int(budget // one) * partition.row_shards
    if most:
        return min(rows, most), []
    needed = f"a row of {tokens} tokens needs {one / 2**30:.3g} GiB on each device"
    return rows, [f"config.rollout.cache_gib = {config.rollout.cache_gib}: {needed}"]


def _check_budget(config: OnlineRun, longest: int) -> list[str]:
    """Every row must fit into a pack, and a pack into a micro-batch."""
    train = config.train
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


def _check_stale(config: OnlineRun) -> list[str]:
    """Rows of older weights need a policy loss that knows of them."""
    stale, hyper = config.rollout.max_staleness, config.hyper
    if not stale or not hasattr(hyper, "old_logprobs"):
        return []
    if hyper.old_logprobs == "sampled" or hyper.correction.how != "off":
        return []
    return [
        f"config.rollout.max_staleness = {stale}: rows that older weights wrote need config.hyper.correction.how = "
        "'truncate' or 'mask', or config.hyper.old_logprobs = 'sampled'"
    ]


def _check_iterations(config: OnlineRun) -> list[str]:
    """The reference is the policy of an iteration's start, and what it writes is for that iteration."""
    faults, rollout = [], config.rollout
    if config.model.reference:
        faults.append(
            f"config.model.reference = {config.model.reference!r}: {config.algo} makes the policy its own reference in "
            "each iteration; leave it empty"
        )
    if rollout.tail in ("carry", "ahead") or rollout.dynamic.enabled:
        faults.append(
            f"config.rollout: {config.algo} compares what the reference of each iteration writes to every prompt: it "
            "needs tail = 'wait' or 'abort' and dynamic.enabled = False"
        )
    return faults


def needed_roles(algo: types.ModuleType, config: OnlineRun) -> tuple[str, ...]:
    """The roles whose weights a run holds, the actor first."""
    return ("actor", *sorted({*algo.TRAINS, *algo.scored_by(config.hyper), *samplers(algo, config)} - {"actor"}))


def samplers(algo: types.ModuleType, config: OnlineRun) -> tuple[str, ...]:
    """The roles that write responses, to train on or to measure; the actor first."""
    compared = config.evaluation.win_rate and config.evaluation.every
    return tuple(sorted({"actor", getattr(algo, "SAMPLED_BY", "actor"), *(["reference"] if compared else [])}))


def _filters(sampling: Sampling) -> bool:
    return bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.min_new_tokens)


def _figures(config: OnlineRun) -> list[str]:
    """What the evaluation measures."""
    evaluation = config.evaluation
    known = prompt_figures(evaluation.samples, bool(evaluation.vote), evaluation.win_rate)
    known += ["reward_invalid", "response_length", "ended", *(f"reward/{name}" for name in config.rewards)]
    return [f"eval/{name}" for name in known]
