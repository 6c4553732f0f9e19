"""Rewards by a generative judge: a language model that is asked for a verdict, and answers in words."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from yatt_jax.errors import InputError
from yatt_jax.rewards.counts import Counts
from yatt_jax.rewards.servers import Patience, RequestFailed, Servers
from yatt_jax.rewards.spec import Failed, Invalid

if TYPE_CHECKING:
    from yatt_jax.types import Sample

_FIELD = re.compile(r"\{(\w+)\}")
_TEMPLATE = (
    "Judge how well the response answers the question.\n\nQuestion:\n{question}\n\nResponse:\n{completion}\n\n"
    'End with a line "Verdict: N", where N is a number from 0 (useless) to 10 (perfect).'
)


class Writer(Protocol):
    """What writes verdicts: a server's client, or an engine on the devices of the job."""

    def write(self, prompts: Sequence[str], votes: int, seed: int, deadline: float) -> list[list[str]]:
        """So many completions of each prompt, others for other seeds.

        Args:
          prompts: texts; each is one turn of a user's where the judge has a chat template.
          votes: completions of each.
          seed: of the request.
          deadline: ``time.monotonic()`` at which the caller wants to be done.

        Raises:
          RequestFailed: it cannot be done.
        """
        ...

    def close(self) -> None:
        """Ends what is open."""
        ...


@dataclasses.dataclass(frozen=True)
class Judge:
    """A reward by verdicts: ``fn = "yatt_jax.rewards.judge:Judge"``, with servers of ``yatt_jax.serve --role=judge``.

    Every sample gets ``votes`` verdicts. Malformed ones are counted and asked for again, up to ``retries`` times; those
    that are still missing then are left out, and a sample with fewer than ``least`` is invalid.

    Attributes:
      urls: servers of the judge.
      path: of the request, ``{"prompts": [text], "votes": n, "seed": s}``, answered by ``{"completions": [[text]]}``.
      template: of the judge's prompt, or a file with it. ``{completion}``, ``{finish}`` (how it ended), ``{prompt}``
        (as the policy saw it), ``{question}`` (the last message, or the prompt where there are none) and ``{NAME}`` of
        any column are put in.
      pattern: regular expression whose first group is the verdict; the last match counts.
      verdicts: what each verdict is worth, in place of numbers, such as ``{"yes": 1.0, "no": 0.0}``; case aside.
      low, high: a number outside is malformed.
      votes: verdicts a sample.
      retries: how often malformed verdicts are asked for again.
      least: well-formed verdicts that a sample needs.
      combine: "mean", "median" or "majority" (the most frequent; of several the mean).
      batch: samples a request.
      concurrency: requests at a time.
      token_env: environment variable that holds a bearer token.
      seed: of the verdicts.
      patience: tries, pauses and deadlines.
    """

    urls: tuple[str, ...] = ()
    path: str = "/generate"
    template: str = _TEMPLATE
    pattern: str = r"(?i)verdict\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)"
    verdicts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    low: float = 0.0
    high: float = 10.0
    votes: int = 1
    retries: int = 2
    least: int = 1
    combine: Literal["mean", "median", "majority"] = "mean"
    batch: int = 16
    concurrency: int = 4
    token_env: str = ""
    seed: int = 0
    patience: Patience = Patience()

    def __post_init__(self) -> None:
        for name, smallest in (("votes", 1), ("retries", 0), ("least", 1), ("batch", 1), ("concurrency", 1)):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {smallest}")
        if self.least > self.votes:
            raise ValueError(f"least = {self.least} is above votes = {self.votes}: no sample could have so many")
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern = {self.pattern!r}: malformed: {error}") from error
        if groups < 1:
            raise ValueError(f"pattern = {self.pattern!r}: needs a group, which is the verdict")

    def open(self) -> JudgeScorer:
        """The reward function, with the servers as writer.

        Raises:
          InputError: malformed addresses, no token, or a template without the completion.
        """
        counts = Counts()
        return JudgeScorer(self, ServedWriter(self, counts), counts)


class ServedWriter:
    """Lets servers write; see ``Writer``."""

    def __init__(self, settings: Judge, counts: Counts) -> None:
        self._path = settings.path
        self._servers = Servers(settings.urls, settings.patience, settings.token_env, counts)

    def write(self, prompts: Sequence[str], votes: int, seed: int, deadline: float) -> list[list[str]]:
        """See ``Writer``."""
        answer = self._servers.post(self._path, {"prompts": list(prompts), "votes": votes, "seed": seed}, deadline)
        found = answer.get("completions") if isinstance(answer, dict) else None
        if not isinstance(found, list) or len(found) != len(prompts):
            raise RequestFailed(f"the answer has no list 'completions' with one for each of {len(prompts)} prompts")
        for some in found:
            if not isinstance(some, list) or len(some) != votes or not all(isinstance(one, str) for one in some):
                raise RequestFailed(f"the answer's completions of a prompt are not {votes} texts")
        return found

    def close(self) -> None:
        """Ends connections."""
        self._servers.close()


class JudgeScorer:
    """Scores samples by verdicts.

    Args:
      settings: what is asked, and how verdicts are read.
      writer: writes the verdicts.
      counts: gets ``verdicts``, ``malformed`` (verdicts that could not be read) and ``asked_again``.

    Raises:
      InputError: a template without the completion.
    """

    def __init__(self, settings: Judge, writer: Writer, counts: Counts) -> None:
        self._settings, self._writer, self.counts = settings, writer, counts
        template = settings.template
        if "\n" not in template and Path(template).is_file():
            template = Path(template).read_text("utf-8")
        if "{completion}" not in template:
            raise InputError(f"template = {template[:80]!r}: has no {{completion}}, or is no file that exists")
        self._template, self._pattern = template, re.compile(settings.pattern)
        self._worth = {name.casefold(): float(value) for name, value in settings.verdicts.items()}
        self._threads = ThreadPoolExecutor(settings.concurrency, "judge")
        for name in ("verdicts", "malformed", "asked_again"):
            counts.add(name, 0)

    def __call__(self, samples: list[Sample]) -> list[float | Invalid | Failed]:
        """A number for each sample, in order.

        Raises:
          InputError: the template names a column that a record lacks, or servers know neither token nor path.
        """
        size = self._settings.batch
        deadline = time.monotonic() + self._settings.patience.deadline_s
        prompts = [self.prompt(sample) for sample in samples]
        parts = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        return [value for part in self._threads.map(lambda part: self._judge(part, deadline), parts) for value in part]

    def close(self) -> None:
        """Ends threads and writer."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._writer.close()

    def prompt(self, sample: Sample) -> str:
        """What the judge is asked of a sample.

        Raises:
          InputError: the template names a column that the record lacks.
        """
        prompt = sample.prompt
        asked = prompt.messages[-1]["content"] if prompt.messages else prompt.text
        own = {"completion": sample.completion, "finish": sample.finish, "prompt": prompt.text, "question": str(asked)}

        def put(match: re.Match[str]) -> str:
            name = match[1]
            if name not in own and name not in prompt.columns:
                raise InputError(
                    f"{prompt.source}: the judge's template has {{{name}}}, and the record's further fields are "
                    f"{sorted(prompt.columns)}"
                )
            return own[name] if name in own else str(prompt.columns[name])

        return _FIELD.sub(put, self._template)

    def verdict(self, text: str) -> float | None:
        """The verdict in what the judge wrote; None where it is malformed."""
        found = [match[1] for match in self._pattern.finditer(text) if match[1] is not None]
        if not found:
            return None
        if self._worth:
            return self._worth.get(found[-1].strip().casefold())
        try:
            value = float(found[-1])
        except ValueError:
            return None
        return value if self._settings.low <= value <= self._settings.high else None

    def _judge(self, prompts: Sequence[str], deadline: float) -> list[float | Invalid | Failed]:
        settings = self._settings
        votes: list[list[float]] = [[] for _ in prompts]
        waiting = list(range(len(prompts)))
        for attempt in range(settings.retries + 1):
            count = max(settings.votes - len(votes[i]) for i in waiting)
            if attempt:
                self.counts.add("asked_again", sum(settings.votes - len(votes[i]) for i in waiting))
            seed = settings.seed * (settings.retries + 1) + attempt
            try:
                found = self._writer.write([prompts[i] for i in waiting], count, seed, deadline)
            except RequestFailed as error:
                if attempt == 0:
                    return [Failed(str(error))] * len(prompts)
                break  # with the verdicts that there are
            for i, texts in zip(waiting, found, strict=True):
                read = [self.verdict(text) for text in texts[: settings.votes - len(votes[i])]]
                votes[i] += [value for value in read if value is not None]
                self.counts.add("verdicts", len(read))
                self.counts.add("malformed", read.count(None))
            waiting = [i for i in waiting if len(votes[i]) < settings.votes]
            if not waiting:
                break
        return [
            self._combined(of) if len(of) >= settings.least else Invalid(f"{len(of)} of {settings.votes} verdicts")
            for of in votes
        ]

    def _combined(self, votes: Sequence[float]) -> float:
        if self._settings.combine == "median":
            return float(statistics.median(votes))
        if self._settings.combine == "majority":
            counts = Counter(votes)
            votes = [value for value, count in counts.items() if count == max(counts.values())]
        return math.fsum(votes) / len(votes)
