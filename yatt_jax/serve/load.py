"""From a configuration to a service: tokenizer, weights, compiled programs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from transformers import PreTrainedTokenizerFast

from yatt_jax.controller.saved_model import from_run, run_of
from yatt_jax.data import tokenizer as tokenizers
from yatt_jax.errors import InputError
from yatt_jax.io import hf
from yatt_jax.models.build import Kind, Model, build
from yatt_jax.parallel.partition import Partition, Split, make_partitions
from yatt_jax.rollout.engine import Engine
from yatt_jax.serve.config import Role, ServeConfig
from yatt_jax.serve.measures import Measures
from yatt_jax.serve.scoring import ScoreModel
from yatt_jax.serve.services import Scores, Service, Writings
from yatt_jax.serve.texts import Texts
from yatt_jax.types import Params

_KINDS: dict[Role, Kind] = {"reward": "reward", "critic": "value", "judge": "lm"}


def make_service(config: ServeConfig, role: Role, measures: Measures) -> Service:
    """Loads a model and compiles what it is served with.

    Raises:
      InputError: a model or tokenizer that cannot be read, that is none of the role, or a split that does not fit.
    """
    try:
        train, rollout = make_partitions(config.parallel, Split(tensor=config.parallel.tensor))
    except ValueError as error:
        raise InputError(f"config.parallel: {error}") from error
    partition = rollout if role == "judge" else train
    model, params, tokenizer, stops = _load(config, role, partition)
    limits = config.limits
    texts = Texts(tokenizer, vocab=model.config.vocab, limit=limits.tokens, cut=limits.overlong == "cut")
    if role != "judge":
        scores = ScoreModel(
            model,
            params,
            partition,
            rows=config.batch.rows,
            tokens=limits.tokens,
            observe=measures.computed,
        )
        scores.compile()
        return Scores(role, scores, texts, config.batch, limits.texts, measures)
    sampling = dataclasses.replace(config.sampling, stop_token_ids=(*config.sampling.stop_token_ids, *stops))
    engine = Engine(
        model,
        tokenizer,
        partition,
        rows=config.batch.rows,
        max_prompt_tokens=limits.tokens,
        max_new_tokens=sampling.max_new_tokens,
    )
    params = engine.group.take(params, model.axes)
    judge = Writings(engine, params, sampling, texts, config.batch, limits.texts, measures, config.seed)
    judge.compile()
    return judge


def _load(
    config: ServeConfig, role: Role, partition: Partition
) -> tuple[Model, Params, PreTrainedTokenizerFast, tuple[int, ...]]:
    """Model, weights, tokenizer and the ids that end a response."""
    run = run_of(config.path)
    folder: Path | None = None
    if run is not None:
        source = from_run(*run, "actor" if role == "judge" else role, partition)
        model, params, found = source.model, source.params, source.tokenizer
        compute = dataclasses.replace(model.config, dtype=config.compute_dtype, remat="none")
        model = _rebuilt(model, compute)
        hf_config = source.hf_config
    else:
        model, params = hf.load_model(
            config.path, _KINDS[role], partition, dtype=config.dtype, compute_dtype=config.compute_dtype
        )
        folder, found = Path(config.path), None
        read = hf.read_folder(config.path)
        named, hf_config = read.architectures, read.hf_config
        if role != "judge" and not any(name.endswith("Classification") for name in named):
            raise InputError(
                f"config.path = {config.path!r}: a language model, whose {role} head would be fresh; give a "
                f"{role} model, or serve it with --role=judge"
            )
    tokenizer: Any = (
        tokenizers.load_tokenizer(config.tokenizer or config.path) if config.tokenizer or not found else found
    )
    if config.chat_template:
        try:
            tokenizer.chat_template = Path(config.chat_template).read_text("utf-8")
        except OSError as error:
            raise InputError(f"config.chat_template = {config.chat_template!r}: {error.strerror}") from error
    if len(tokenizer) > model.config.vocab:
        raise InputError(f"the tokenizer has {len(tokenizer)} tokens, and the model knows {model.config.vocab}")
    longest = config.limits.tokens + (config.sampling.max_new_tokens if role == "judge" else 0)
    if (positions := hf_config.get("max_position_embeddings") or 0) and longest > positions:
        raise InputError(
            f"config.limits.tokens allows rows of {longest} tokens, and the model has {positions} positions"
        )
    ends = folder if folder is not None and folder.is_dir() else None
    return model, jax.block_until_ready(params), tokenizer, tokenizers.stop_token_ids(tokenizer, ends)


def _rebuilt(model: Model, config: Any) -> Model:
    """The same model with another decoder configuration."""
    head = model.abstract.get("head")
    shape = {"labels": head["kernel"].shape[-1], "bias": "bias" in head} if model.kind == "reward" and head else {}
    return build(model.kind, config, str(jax.tree.leaves(model.abstract)[0].dtype), **shape)
