"""The host side of sampling: which prompt sits in which row, when a row ends, and how results are put together."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from yatt_jax.models.build import Model
from yatt_jax.ops.select import Filters
from yatt_jax.parallel.local import sampling_group
from yatt_jax.parallel.partition import Partition
from yatt_jax.rollout import device
from yatt_jax.rollout.assemble import Result, assemble
from yatt_jax.rollout.sampling import MAX_STOP_IDS, Sampling
from yatt_jax.rollout.stops import Stop, StopWatch, Tokenizer, check_stops, text_of
from yatt_jax.types import Params, Prompt, Rollout, Sample

FINISH = {device.STOP: "stop", device.LENGTH: "length", device.INVALID: "invalid"}


@dataclasses.dataclass(frozen=True)
class Progress:
    """What ``progress`` is told, before the first call of a program and after each decode chunk.

    Attributes:
      stage: "compile" before a program's first call, else "sample".
      ended: prompts whose response has ended.
      prompts: all prompts of the batch.
      tokens: response tokens sampled so far.
    """

    stage: Literal["compile", "sample"]
    ended: int
    prompts: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Stats:
    """Figures of one ``generate``.

    Attributes:
      steps: decode steps; each computes one token for every row.
      waves: batches of rows.
      tokens: response tokens returned.
      dropped: tokens sampled past a stop string.
      invalid: rows that ended because their logits were NaN or infinite.
      computed: tokens that decode steps computed, those of ended and unused rows included.
      seconds: wall time.
    """

    steps: int = 0
    waves: int = 0
    tokens: int = 0
    dropped: int = 0
    invalid: int = 0
    computed: int = 0
    seconds: float = 0.0

    @property
    def fill(self) -> float:
        """Share of the tokens computed in decode steps that were returned."""
        return self.tokens / max(1, self.computed)

    def __add__(self, other: Stats) -> Stats:
        return Stats(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    @staticmethod
    def of_wave(steps: int, rows: int, sampled: int, results: Sequence[Result]) -> Stats:
        """Figures of one wave, in which ``sampled`` tokens were drawn."""
        tokens = sum(len(r.tokens) for r in results)
        invalid = sum(r.finish == "invalid" for r in results)
        return Stats(steps, 1, tokens, sampled - tokens, invalid, steps * rows)


class Engine:
    """Samples responses to prompts with a fixed number of rows.

    Programs compile once for each prompt bucket. Everything in ``Sampling``, the seed, and lengths within a bucket are
    traced values. A token depends on (weights, prompt, sampling, seed, sample id, position): not on the row it sits in,
    on what is sampled beside it, on buckets or chunks, or on how devices are split.

    Args:
      model: a language model.
      tokenizer: for stop strings and completions.
      partition: the job's sampling partition; this process samples on its part of it (see ``parallel.local``).
      rows: rows that this process samples at a time, rounded up to a multiple of its row shards.
      prompt_buckets: lengths that prompts are padded to.
      max_new_tokens: capacity for response tokens; ``Sampling.max_new_tokens`` may be less.
      record_kept: return ``Rollout.kept``, V / 8 bytes a token; nothing is spent on it otherwise.
      chunk: decode steps between two looks of the host, when stop strings or progress ask for it.
      cache_dtype: of keys and values; the model's compute dtype by default.
      unroll: decode with the layers taken out of their stack: quicker on CPUs (where it is the default), at the price
        of a second copy of the weights while decoding.
      progress: called as sampling proceeds.
      agree: exchanges a value with the other members of the group; needed where the group has several.

    Attributes:
      group: the processes that sample together, and their devices.
      stats: figures of the last ``generate``.

    Raises:
      ValueError: a setting below 1, or a model without an output matrix.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        partition: Partition,
        *,
        rows: int,
        prompt_buckets: Sequence[int],
        max_new_tokens: int,
        record_kept: bool = False,
        chunk: int = 16,
        cache_dtype: str | None = None,
        unroll: bool | None = None,
        progress: Callable[[Progress], None] | None = None,
        agree: Callable[[list[int]], list[list[int]]] | None = None,
    ):
        if model.kind != "lm":
            raise ValueError(f"sampling needs a language model, and this is a {model.kind} model")
        numbers = {"rows": rows, "max_new_tokens": max_new_tokens, "chunk": chunk}
        for name, value in [*numbers.items(), *(("prompt_buckets", b) for b in prompt_buckets)]:
            if value < 1:
                raise ValueError(f"{name} = {value}: it must be at least 1")
        if not prompt_buckets:
            raise ValueError("prompt_buckets is empty: give at least one prompt length")
        self.group = sampling_group(partition)
        partition = self.group.partition
        members = len(self.group.members)
        # Together, each member has its rows on its own devices before and after they are sampled.
        shards = partition.row_shards if self.group.alone else partition.mesh.size // members
        self.rows = -(-rows // shards) * shards
        self._agree = agree or (lambda value: [value])
        self.buckets = tuple(sorted(set(prompt_buckets)))
        self.max_new_tokens = max_new_tokens
        self.record_kept = record_kept
        self.chunk = chunk
        self.stats = Stats()
        self._vocab = model.config.vocab
        self._tokenizer = tokenizer
        self._progress = progress
        self._compiled: set[int] = set()
        self._get = self.group.getter()
        self._programs = device.Programs(
            model,
            partition,
            rows=self.rows * members,
            max_new_tokens=max_new_tokens,
            record_kept=record_kept,
            cache_dtype=cache_dtype,
            unroll=partition.mesh.devices.flat[0].platform == "cpu" if unroll is None else unroll,
        )

    def generate(
        self,
        params: Params,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        seed: int,
        sample_ids: Sequence[int],
        groups: Sequence[int],
        version: int,
    ) -> tuple[Rollout, list[Sample]]:
        """Samples one response to each prompt.

        More prompts than rows are sampled in waves, sorted by length.

        Args:
          params: weights, in the sampling partition, as ``group.take`` gives them.
          prompts: one for each response; repeat a prompt to sample it several times.
          sampling: sampling parameters.
          seed: of the run, 0 to 2^64 - 1.
          sample_ids: number of each sample, unique in the run.
          groups: rows that answer the same prompt share a group number.
          version: optimizer step of the weights.

        Returns:
          Rows in the order of the prompts, as NumPy arrays padded to ``padded_length``, and the samples.
          ``Rollout.kept`` has all bits set where no response token is. A row whose logits were NaN or infinite ends
          there with finish "invalid" and the tokens it had.

        Raises:
          ValueError: an empty prompt, or one longer than the largest bucket (the message names its source); a stop id
            outside the vocabulary; more new tokens than the capacity; lists of unequal length.
        """
        begun = time.perf_counter()
        self._check(prompts, sampling, seed, sample_ids, groups)
        # The longest first: if memory is short, it is at the start.
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].tokens))
        self.stats = Stats()
        results: dict[int, Result] = {}
        for number, longest in enumerate(self._longest([len(prompts[i].tokens) for i in order])):
            begin = number * self.rows
            wave = order[begin : begin + self.rows]
            ids = [sample_ids[i] for i in wave]
            wanted = [prompts[i] for i in wave]
            found = self._wave(params, wanted, sampling, seed, ids, longest=longest, before=begin, total=len(prompts))
            results.update(zip(wave, found, strict=True))
        finished = [results[i] for i in range(len(prompts))]
        samples = [
            Sample(p, r.completion, r.tokens.tolist(), r.finish, int(s), int(g))
            for p, r, s, g in zip(prompts, finished, sample_ids, groups, strict=True)
        ]
        rollout = assemble(prompts, finished, samples, version, self._vocab if self.record_kept else None)
        self.stats = dataclasses.replace(self.stats, seconds=time.perf_counter() - begun)
        return rollout, samples

    def _longest(self, lengths: Sequence[int]) -> list[int]:
        """The longest prompt of each wave, over all members: they step together.

        Args:
          lengths: of this process's prompts, descending.
        """
        own = list(lengths[:: self.rows])
        everyone = self._agree(own)
        return [max(waves) for waves in itertools.zip_longest(*everyone, fillvalue=0)]

    def _check(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int,
        sample_ids: Sequence[int],
        groups: Sequence[int],
    ) -> None:
        if not len(prompts) == len(sample_ids) == len(groups):
            raise ValueError(
                f"{len(prompts)} prompts, {len(sample_ids)} sample_ids and {len(groups)} groups: want as many"
            )
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed = {seed}: it must be 0 or more, and below 2^64")
        if sampling.max_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"sampling.max_new_tokens = {sampling.max_new_tokens} is above the capacity that the engine was built "
                f"for, max_new_tokens = {self.max_new_tokens}"
            )
        for token in sampling.stop_token_ids:
            if token >= self._vocab:
                raise ValueError(f"sampling.stop_token_ids: {token} is not in a vocabulary of {self._vocab}")
        check_stops(self._tokenizer, sampling.stop)
        for prompt in prompts:
            if not prompt.tokens:
                raise ValueError(f"{prompt.source}: the prompt has no tokens; sampling needs at least one, such as BOS")
            if len(prompt.tokens) > self.buckets[-1]:
                raise ValueError(
                    f"{prompt.source}: the prompt has {len(prompt.tokens)} tokens, and the largest prompt bucket is "
                    f"{self.buckets[-1]}; raise the prompt limit, or skip or cut long prompts when reading the data"
                )
            if min(prompt.tokens) < 0 or max(prompt.tokens) >= self._vocab:
                raise ValueError(f"{prompt.source}: the prompt has token ids outside the vocabulary of {self._vocab}")

    def _wave(
        self,
        params: Params,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int,
        sample_ids: Sequence[int],
        *,
        longest: int,
        before: int,
        total: int,
    ) -> list[Result]:
        """Samples at most as many prompts as there are rows; ``before`` of ``total`` have been sampled."""
        bucket = next(b for b in self.buckets if b >= longest)
        tokens = np.zeros((self.rows, bucket), np.int32)
        lengths, ids = np.zeros(self.rows, np.int32), np.zeros(self.rows, np.int32)
        for row, (prompt, sample_id) in enumerate(zip(prompts, sample_ids, strict=True)):
            tokens[row, : len(prompt.tokens)] = prompt.tokens
            lengths[row], ids[row] = len(prompt.tokens), sample_id
        if bucket not in self._compiled:
            self._tell("compile", before, total, self.stats.tokens)
            self._compiled.add(bucket)
        seed_words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
        put, members = self.group.put, len(self.group.members)
        placed = put(tokens)
        state, cache = self._programs.start(placed, put(lengths), seed_words, put(ids))
        if longest > 1:
            cache = self._programs.prefill(params, cache, placed)

        controls = row_controls(sampling, self.rows * members, self._vocab)
        watch = StopWatch(self._tokenizer, sampling.stop, sampling.min_new_tokens, len(prompts))
        looks = bool(sampling.stop) or self._progress is not None
        limit = np.int32(self.chunk if looks else sampling.max_new_tokens)
        halt, running, steps = np.zeros(self.rows, bool), True, 0
        while running:  # by what the devices count: the same for all members
            cache, state, ran, left = self._programs.decode(params, cache, state, controls, put(halt), limit)
            steps, running = steps + int(ran), int(left) > 0
            if sampling.stop:
                tokens, count = self._get((state.tokens, state.count))
                halt = np.zeros(self.rows, bool)
                halt[: len(prompts)] = watch.look(tokens, count)
            if self._progress is not None:
                reason, count = self._get((state.reason, state.count))
                ended = len(prompts) - int(np.sum((reason == device.RUNNING) & ~halt))
                self._tell("sample", before + ended, total, self.stats.tokens + int(count.sum()))
        state = self._get(state)
        sampled = int(state.count.sum())
        results = self._collect(state, watch.found)
        self.stats = self.stats + Stats.of_wave(steps, self.rows, sampled, results)
        return results

    def _collect(self, state: Any, stops: Sequence[Stop | None]) -> list[Result]:
        """What the rows hold (``device.Rows`` on the host); rows past ``stops`` are unused."""
        reason, count, tokens, kept = state.reason, state.count, state.tokens, state.kept
        sampled, plain = state.sampled_logprobs, state.plain_logprobs
        results = []
        for row, stop in enumerate(stops):
            n = int(count[row]) if stop is None else stop.tokens
            finish = FINISH[int(reason[row])] if stop is None else "stop_string"
            text = text_of(self._tokenizer, tokens[row, :n].tolist()) if stop is None else stop.text
            support = None if kept is None else kept[row, :n]
            results.append(Result(tokens[row, :n], sampled[row, :n], plain[row, :n], support, finish, text))
        return results

    def _tell(self, stage: Literal["compile", "sample"], ended: int, prompts: int, tokens: int) -> None:
        if self._progress is not None:
            self._progress(Progress(stage, ended, prompts, tokens))


def row_controls(sampling: Sampling, rows: int, vocab: int) -> device.Controls:
    """One sampling for all rows. Each row has values of its own, so that rows may differ later without compiling."""

    def each(value: float, dtype: type) -> Any:
        return np.full(rows, value, dtype)

    stop_ids: Any = np.full((rows, MAX_STOP_IDS), vocab, np.int32)
    stop_ids[:, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
    filters = Filters(
        temperature=each(sampling.temperature, np.float32),
        top_k=each(sampling.top_k, np.int32),
        top_p=each(sampling.top_p, np.float32),
        min_p=each(sampling.min_p, np.float32),
    )
    return device.Controls(
        filters, each(sampling.min_new_tokens, np.int32), each(sampling.max_new_tokens, np.int32), stop_ids
    )
