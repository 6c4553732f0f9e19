"""The sampling engine: continuous batching over a fixed number of slots."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Literal

from yatt_jax.models.build import Model
from yatt_jax.parallel.local import sampling_group
from yatt_jax.parallel.partition import Partition
from yatt_jax.rollout import device
from yatt_jax.rollout.ahead import Ahead, like
from yatt_jax.rollout.assemble import Result, assemble
from yatt_jax.rollout.pace import Chunk
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.rollout.session import Session
from yatt_jax.rollout.slots import Request
from yatt_jax.rollout.stops import Tokenizer, check_stops
from yatt_jax.types import Params, Prompt, Rollout, Sample


@dataclasses.dataclass(frozen=True)
class Progress:
    """What ``progress`` is told: before the programs compile, after each decode chunk, and at the end.

    Attributes:
      stage: "compile" before the first call, else "sample".
      ended: prompts whose response has ended.
      prompts: all prompts of the batch.
      tokens: response tokens sampled so far.
    """

    stage: Literal["compile", "sample"]
    ended: int
    prompts: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Ask:
    """A response to sample.

    Attributes:
      prompt: what it answers.
      sample_id: number of the sample, unique in the run.
      begun: what an earlier call wrote of it.
      limit: tokens at which it is cut; 0: as the sampling parameters say.
    """

    prompt: Prompt
    sample_id: int
    begun: Result | None = None
    limit: int = 0


@dataclasses.dataclass(frozen=True)
class Stats:
    """Figures of one call.

    Attributes:
      steps: decode steps; each computes one token for every slot there is at the time.
      chunks: calls of the decode program.
      tokens: response tokens written.
      dropped: tokens sampled past a stop string.
      invalid: rows that ended because their logits were NaN or infinite.
      unfinished: rows that were stopped before their end.
      computed: tokens that decode steps computed, those of ended and unused slots included.
      prompt_tokens: prompt tokens computed, after sharing.
      prompt_computed: the same with the padding of packs.
      seconds: wall time.
      paces: how long each chunk of decode steps took.
    """

    steps: int = 0
    chunks: int = 0
    tokens: int = 0
    dropped: int = 0
    invalid: int = 0
    unfinished: int = 0
    computed: int = 0
    prompt_tokens: int = 0
    prompt_computed: int = 0
    seconds: float = 0.0
    paces: tuple[Chunk, ...] = ()

    @property
    def fill(self) -> float:
        """Share of the tokens computed in decode steps that were returned."""
        return self.tokens / max(1, self.computed)


class Engine:
    """Samples responses to prompts in a fixed number of slots.

    Rows that end leave their slots between chunks of decode steps, and waiting prompts take them; when none waits, ever
    smaller programs finish what still runs. Everything compiles at the first ``generate``; all of ``Sampling``, the
    seed, and lengths are traced values. A token depends on (weights, prompt, sampling, seed, sample id, position): not
    on the slot it is drawn in, on what is sampled beside it, on chunks, packs or order, or on how devices are split.

    Args:
      model: a language model.
      tokenizer: for stop strings and completions.
      partition: the job's sampling partition; this process samples on its part of it (see ``parallel.local``).
      rows: slots of this process, rounded up to a multiple of its row shards.
      max_prompt_tokens: longest prompt.
      max_new_tokens: capacity for response tokens; ``Sampling.max_new_tokens`` may be less.
      record_kept: return ``Rollout.kept``, V / 8 bytes a token; nothing is spent on it otherwise.
      chunk: most decode steps between two looks of the host.
      pack: tokens of prompts that are computed as one row; longer prompts are computed in pieces of as many.
      cache_dtype: of keys and values; the model's compute dtype by default.
      resumes: responses that an earlier call began are gone on with.
      unroll: sample with the layers taken out of their stack: quicker on CPUs (where it is the default), at the price
        of a second copy of the weights while sampling.
      progress: called as sampling proceeds.
      agree: exchanges numbers with the other members of the group; needed where the group has several.

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
        max_prompt_tokens: int,
        max_new_tokens: int,
        record_kept: bool = False,
        chunk: int = 16,
        pack: int = 512,
        cache_dtype: str | None = None,
        resumes: bool = False,
        unroll: bool | None = None,
        progress: Callable[[Progress], None] | None = None,
        agree: Callable[[list[int]], list[list[int]]] | None = None,
    ):
        if model.kind != "lm":
            raise ValueError(f"sampling needs a language model, and this is a {model.kind} model")
        numbers = {"rows": rows, "max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens}
        for name, value in (numbers | {"chunk": chunk, "pack": pack}).items():
            if value < 1:
                raise ValueError(f"{name} = {value}: it must be at least 1")
        self.group = sampling_group(partition)
        partition = self.group.partition
        members = len(self.group.members)
        # Together, each member has its rows on its own devices before and after they are sampled.
        self.lanes = partition.row_shards if self.group.alone else partition.mesh.size // members
        self.rows = -(-rows // self.lanes) * self.lanes
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        self.record_kept = record_kept
        self.chunk = chunk
        self._resumes = resumes
        self._longest = max_prompt_tokens + (max_new_tokens - 1 if resumes else 0)
        self.pack = min(pack, -(-max(1, self._longest - 1) // 8) * 8)
        self.stats = Stats()
        self._vocab = model.config.vocab
        self._tokenizer = tokenizer
        self._progress = progress
        self._agree = agree or (lambda value: [value])
        self._compiled = False
        self._get = self.group.getter()
        self._programs = device.Programs(
            model,
            partition,
            rows=self.rows * members,
            capacity=max_prompt_tokens + max_new_tokens,
            chunk=chunk,
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
        finished: Callable[[Sample], None] | None = None,
    ) -> tuple[Rollout, list[Sample]]:
        """Samples one response to each prompt.

        Args:
          params: weights, in the sampling partition, as ``group.take`` gives them.
          prompts: one for each response; repeat a prompt to sample it several times: it is computed once a row shard.
          sampling: sampling parameters.
          seed: of the run, 0 to 2^64 - 1.
          sample_ids: number of each sample, unique in the run.
          groups: rows that answer the same prompt share a group number.
          version: optimizer step of the weights.
          finished: called with each sample as soon as it has ended, while others are still sampled.

        Returns:
          Rows in the order of the prompts, as NumPy arrays padded to ``padded_length``, and the samples.
          ``Rollout.kept`` has all bits set where no response token is. A row whose logits were NaN or infinite ends
          there with finish "invalid" and the tokens it had.

        Raises:
          ValueError: as ``sample``; lists of unequal length.
        """
        if not len(prompts) == len(sample_ids) == len(groups):
            raise ValueError(
                f"{len(prompts)} prompts, {len(sample_ids)} sample_ids and {len(groups)} groups: want as many"
            )
        asked = [Ask(prompt, int(number)) for prompt, number in zip(prompts, sample_ids, strict=True)]

        def ended(i: int, result: Result) -> None:
            if finished is not None:
                finished(to_sample(asked[i], result, int(groups[i])))

        results = self.sample(params, asked, sampling, seed=seed, finished=ended)
        samples = [to_sample(*of) for of in zip(asked, results, map(int, groups), strict=True)]
        versions = [version] * len(prompts)
        return assemble(prompts, results, samples, versions, self._vocab if self.record_kept else None), samples

    def sample(
        self,
        params: Params,
        asked: Sequence[Ask],
        sampling: Sampling,
        *,
        seed: int,
        finished: Callable[[int, Result], None] | None = None,
        enough: Callable[[int], bool] | None = None,
    ) -> list[Result]:
        """Samples responses, all of them to their end unless ``enough`` stops it before.

        A response that was not finished has finish "unfinished". It can be asked for again, with this result as what
        is begun, by this engine or another: under the same weights its tokens are those of one that was never stopped.

        Args:
          params: weights, in the sampling partition, as ``group.take`` gives them.
          asked: the responses.
          sampling: sampling parameters.
          seed: of the run, 0 to 2^64 - 1.
          finished: called with place and result of each response as soon as it has ended.
          enough: asked before each chunk, with the decode steps so far: whether to stop. Processes that sample together
            stop when all say so.

        Returns:
          The results, in the order asked.

        Raises:
          ValueError: an empty prompt, or one that is too long (the message names its source); a stop id outside the
            vocabulary; more new tokens than the capacity; something begun, and ``resumes`` is off.
        """
        start = time.perf_counter()
        self._check(asked, sampling, seed)
        keys: dict[tuple[int, ...], int] = {}
        requests = [_request(i, ask, sampling, keys) for i, ask in enumerate(asked)]
        session = self._session(self._programs, asked, sampling, seed)
        tell = lambda stage: self._tell(stage, session, len(asked))  # noqa: E731
        if not self._compiled:
            tell("compile")
            session.compile(params, long=self._longest - 1 > self.pack)
            self._compiled = True
        results = session.run(
            params,
            requests,
            finished or (lambda *_: None),
            lambda: tell("sample"),
            enough=enough,
        )
        written = sum(len(results[r.number].tokens) - r.written for r in requests)
        self.stats = Stats(
            tokens=written,
            dropped=session.sampled - written,
            invalid=sum(result.finish == "invalid" for result in results.values()),
            unfinished=sum(result.finish == "unfinished" for result in results.values()),
            seconds=time.perf_counter() - start,
            paces=tuple(session.paces),
            **dataclasses.asdict(session.counts),
        )
        return [results[i] for i in range(len(asked))]

    def compile_ahead(self, params: Params) -> None:
        """Compiles everything without running anything, for the first call of ``sample`` to find.

        May be called in another thread while programs run, on these devices or others.

        Args:
          params: weights, as for ``sample``, or their shapes and shardings.
        """
        session = self._session(Ahead(self._programs), (), Sampling(), 0)
        session.compile(like(params), long=self._longest - 1 > self.pack)

    def _session(
        self, programs: device.Programs | Ahead, asked: Sequence[Ask], sampling: Sampling, seed: int
    ) -> Session:
        return Session(
            programs,
            self.group,
            self._tokenizer,
            get=self._get if programs is self._programs else lambda tree: tree,
            agree=self._agree,
            lanes=self.lanes,
            size=self.rows // self.lanes,
            pack=self.pack,
            chunk=self.chunk,
            sampling=sampling,
            vocab=self._vocab,
            seed=seed,
            sample_ids=[ask.sample_id for ask in asked],
            begun=[ask.begun for ask in asked],
        )

    def _check(self, asked: Sequence[Ask], sampling: Sampling, seed: int) -> None:
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
        for ask in asked:
            self._check_prompt(ask.prompt)
            begun = 0 if ask.begun is None else len(ask.begun.tokens)
            if begun and not self._resumes:
                raise ValueError(f"sample {ask.sample_id} is begun: the engine needs resumes = True to go on with it")
            if ask.begun is not None and ask.begun.finish != "unfinished":
                raise ValueError(
                    f"sample {ask.sample_id} has ended ({ask.begun.finish}); there is nothing to go on with"
                )
            limit = ask.limit or sampling.max_new_tokens
            if not begun < limit <= sampling.max_new_tokens:
                raise ValueError(
                    f"sample {ask.sample_id}: limit = {limit} must be above the {begun} tokens it has, and at most "
                    f"sampling.max_new_tokens = {sampling.max_new_tokens}"
                )

    def _check_prompt(self, prompt: Prompt) -> None:
        if not prompt.tokens:
            raise ValueError(f"{prompt.source}: the prompt has no tokens; sampling needs at least one, such as BOS")
        if len(prompt.tokens) > self.max_prompt_tokens:
            raise ValueError(
                f"{prompt.source}: the prompt has {len(prompt.tokens)} tokens, and the longest that is allowed has "
                f"{self.max_prompt_tokens}; raise the prompt limit, or skip or cut long prompts when reading the data"
            )
        if min(prompt.tokens) < 0 or max(prompt.tokens) >= self._vocab:
            raise ValueError(f"{prompt.source}: the prompt has token ids outside the vocabulary of {self._vocab}")

    def _tell(self, stage: Literal["compile", "sample"], session: Session, prompts: int) -> None:
        if self._progress is not None:
            self._progress(Progress(stage, session.ended, prompts, session.sampled))


def _request(number: int, ask: Ask, sampling: Sampling, keys: dict[tuple[int, ...], int]) -> Request:
    """What the slots need to know; equal tokens share a key."""
    before = [] if ask.begun is None else ask.begun.tokens.tolist()
    tokens = [*ask.prompt.tokens, *before]
    key = keys.setdefault(tuple(tokens), number)
    return Request(number, tokens, key, len(before), ask.limit or sampling.max_new_tokens)


def to_sample(ask: Ask, result: Result, group: int) -> Sample:
    """A response as rewards and reports read it."""
    return Sample(ask.prompt, result.completion, result.tokens.tolist(), result.finish, ask.sample_id, group)
