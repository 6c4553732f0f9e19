"""Reward models on the mesh: which ones a run has, and how they score texts in packs, as the critic scores rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from transformers import PreTrainedTokenizerFast

from yatt_jax.controller.hosts import Hosts
from yatt_jax.controller.roles import REWARD, decoder_shape
from yatt_jax.controller.spread import Room, Spreader
from yatt_jax.data import tokenizer as tokenizers
from yatt_jax.errors import InputError
from yatt_jax.io import hf
from yatt_jax.models.build import Model, build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.ops.heads import OverSteps, over_steps
from yatt_jax.parallel.fill import rounded
from yatt_jax.parallel.pack import Micro, Packed, fold, take
from yatt_jax.parallel.partition import Partition, constrain
from yatt_jax.parallel.process_rows import rows_each
from yatt_jax.rewards import Invalid, ModelReward, RewardSpec
from yatt_jax.rewards.model import Marked, SampleReader, combined
from yatt_jax.types import Inputs, Params, Sample


@dataclasses.dataclass(frozen=True)
class PlannedReward:
    """A reward model of a run, its weights unread.

    Attributes:
      spec: how the configuration names it.
      role: under which its weights are held; rewards that name the same folder share it.
      model: the static half.
      tokenizer: the model's own, where it is given text; None: it is given the ids that were sampled.
      max_tokens: longest text.
    """

    spec: ModelReward
    role: str
    model: Model
    tokenizer: PreTrainedTokenizerFast | None
    max_tokens: int


def plan_reward_models(
    rewards: Mapping[str, RewardSpec],
    tokenizer: PreTrainedTokenizerFast,
    vocab: int,
    row_tokens: int,
    *,
    param_dtype: str,
    compute: Mapping[str, str],
) -> dict[str, PlannedReward]:
    """The reward models that a run's rewards name, by reward.

    Args:
      rewards: of the run.
      tokenizer: the actor's.
      vocab: entries of the actor's vocabulary.
      row_tokens: the longest row of the run.
      param_dtype: of the parameters.
      compute: fields of ``DecoderConfig``, the same for every model of the run.

    Raises:
      InputError: a folder that cannot be read, that holds no reward model, or one that does not fit its settings.
    """
    found: dict[str, PlannedReward] = {}
    for name, reward in rewards.items():
        spec, where = reward.model, f"config.rewards.{name}.model"
        if not spec.path:
            continue
        shape, labels, bias = read_head(spec.path, where)
        if len(spec.weights or (1,)) != labels:
            given = f"weights has {len(spec.weights)} numbers" if spec.weights else "weights is empty"
            raise InputError(
                f"{where}: {given}, and the head of {spec.path} has {labels} outputs; give each its weight"
            )
        model = build("reward", dataclasses.replace(shape, **compute), param_dtype, labels=labels, bias=bias)
        own, limit = _own_tokenizer(spec, where, tokenizer, vocab, shape.vocab), spec.max_tokens or row_tokens
        same = [other.role for other in found.values() if other.spec.path == spec.path]
        role = same[0] if same else f"{REWARD}{name}"
        found[name] = PlannedReward(spec, role, model, own, limit if own else max(limit, row_tokens))
    return found


def read_head(path: str, where: str) -> tuple[DecoderConfig, int, bool]:
    """The decoder of a reward model's folder, the outputs of its head, and whether that has a bias.

    Raises:
      InputError: a folder that cannot be read, or that holds no reward model; the message begins with ``where``.
    """
    try:
        folder = hf.read_folder(path)
        head = hf.scalar_head(folder)
    except hf.CheckpointError as error:
        raise InputError(f"{where}: {error}") from error
    if head is None:
        raise InputError(
            f"{where}: {path} holds a language model and no score for a text; give a sequence-classification folder, "
            "such as the export of a reward_model run"
        )
    return folder.config, *head


def _own_tokenizer(
    spec: ModelReward, where: str, actors: PreTrainedTokenizerFast, vocab: int, own_vocab: int
) -> PreTrainedTokenizerFast | None:
    """The reward model's tokenizer where it is to be given text; None where it can be given the actor's ids."""
    if spec.tokens == "ids":
        if own_vocab != vocab:
            raise InputError(
                f"{where}.tokens = 'ids': the vocabulary of {spec.path} has {own_vocab} entries and the actor's "
                f"{vocab}, so that ids mean other tokens; use 'text'"
            )
        return None
    own = tokenizers.load_tokenizer(spec.path)
    same = own_vocab == vocab and own.get_vocab() == actors.get_vocab()
    return None if spec.tokens == "auto" and same and not spec.steps else own


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarkedRows:
    """Texts for a reward model.

    Attributes:
      inputs: the texts.
      mask: 1 at the tokens whose outputs are read.
    """

    inputs: Inputs
    mask: Float[Array, "B T"]


class TextScorer:
    """A reward model that scores texts of all processes on the training partition.

    Args:
      model: the static half.
      train: the partition.
      hosts: this process among those of the job.
      rows: texts of all processes that are scored at a time.
      max_tokens: longest text.
      budget: tokens of a micro-batch on each data shard; at least ``max_tokens``.
      pack_tokens: tokens of a pack; 0: ``max_tokens``.
      steps: how the outputs at several tokens become one; "": the outputs at the last token are what is wanted.
    """

    def __init__(
        self,
        model: Model,
        train: Partition,
        hosts: Hosts,
        *,
        rows: int,
        max_tokens: int,
        budget: int,
        pack_tokens: int = 0,
        steps: OverSteps | Literal[""] = "",
    ) -> None:
        self._train, self._hosts = train, hosts
        self._length = rounded(max_tokens)
        self._each = rows_each(math.ceil(rows / hosts.count), train)
        self._room = Room.make(
            self._each * hosts.count, self._length, max(budget, self._length), max(pack_tokens, self._length), train
        )
        self._spreader = Spreader(train, decoder_shape(model.config), hosts, rows=self._each)
        self._program = _make_program(model, train, steps)

    def __call__(self, params: Params, texts: Sequence[Marked]) -> Float[np.ndarray, "n Y"]:
        """The outputs for each of this process's texts; every process must call, also one without any."""
        rounds = max(self._hosts.gather("texts for a reward model", math.ceil(len(texts) / self._each)))
        parts = [
            self._score(params, texts[turn * self._each : (turn + 1) * self._each]) for turn in range(max(rounds, 1))
        ]
        return np.concatenate(parts)

    def _score(self, params: Params, texts: Sequence[Marked]) -> np.ndarray:
        rows = marked_rows(texts, self._length)
        lengths = np.array([len(text.tokens) for text in texts], np.int64)
        placed_rows, placed = self._spreader.spread(rows, lengths, self._room)
        return self._spreader.own(self._program(params, Packed(placed_rows, placed.layout)), placed)


def marked_rows(texts: Sequence[Marked], length: int) -> MarkedRows:
    """Texts as host arrays ``[n, length]``."""
    tokens, mask = np.zeros((len(texts), length), np.int32), np.zeros((len(texts), length), np.float32)
    lengths = np.array([len(text.tokens) for text in texts], np.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = text.tokens
        mask[row, list(text.read)] = 1.0
    inside = np.arange(length) < lengths[:, None]
    positions = np.where(inside, np.arange(length), 0).astype(np.int32)
    inputs: Inputs = Inputs(tokens, positions, inside.astype(np.int32))  # type: ignore[arg-type]
    return MarkedRows(inputs, mask)  # type: ignore[arg-type]


def _make_program(
    model: Model, train: Partition, steps: OverSteps | Literal[""]
) -> Callable[[Params, Packed], Float[Array, "B Y"]]:
    """A compiled scorer of packed texts, one micro-batch after another."""
    outputs = model.abstract["head"]["kernel"].shape[-1]

    def read(params: Params, micro: Micro) -> jax.Array:
        S, T = len(micro.slots), micro.rows.mask.shape[-1]
        scores = model.bind(params)(micro.inputs).reshape(S, -1, outputs)
        at, mask = micro.at.reshape(S, -1, T), micro.rows.mask
        if steps:
            of_tokens = take(scores, micro.at)[..., 0].reshape(-1, T)
            return over_steps(of_tokens, mask, steps)[:, None]
        last = jnp.argmax(mask, axis=-1).reshape(S, -1, 1)  # 0 in a row without a text, which has no place
        return take(scores, jnp.take_along_axis(at, last, axis=-1)[..., 0]).reshape(-1, outputs)

    def score(params: Params, packed: Packed) -> jax.Array:
        with train.active():
            rows = packed.rows.mask.shape[0]
            start = constrain(jnp.zeros((rows, 1 if steps else outputs), jnp.float32), "rows", None)
            return fold(packed, lambda micro, so_far: micro.put(read(params, micro), so_far), start)

    return jax.jit(score, out_shardings=train.rows)


class RewardModel:
    """A reward model as a reward: called by every process with its samples, in the same order of calls.

    Args:
      planned: the model.
      scorer: for its texts.
      weights: gives the parameters when they are needed.
    """

    def __init__(self, planned: PlannedReward, scorer: TextScorer, weights: Callable[[], Params]) -> None:
        self._planned, self._scorer, self._weights = planned, scorer, weights
        self._reader = SampleReader(planned.spec, planned.tokenizer, planned.max_tokens)

    def __call__(self, samples: Sequence[Sample]) -> list[float | Invalid]:
        """A score for each sample, or why it has none."""
        readings = self._reader.read(samples)
        texts = [reading for reading in readings if isinstance(reading, Marked)]
        scores = iter(combined(self._scorer(self._weights(), texts), self._planned.spec.weights))
        return [next(scores) if isinstance(reading, Marked) else reading for reading in readings]
