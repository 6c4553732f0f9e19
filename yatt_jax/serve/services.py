"""What a server of each role answers."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int

from yatt_jax.rollout.engine import Ask, Engine
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.serve.batching import Batcher
from yatt_jax.serve.config import BatchConfig
from yatt_jax.serve.measures import Measures
from yatt_jax.serve.scoring import ScoreModel
from yatt_jax.serve.texts import RequestError, Texts
from yatt_jax.types import Params, Prompt


class Service(Protocol):
    """A role that is served.

    Attributes:
      path: where it is asked.
    """

    path: str

    def start(self) -> None:
        """Begins to work, on the running event loop."""
        ...

    async def stop(self) -> None:
        """Ends the work under way."""
        ...

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request.

        Raises:
          RequestError: it cannot be answered.
          Busy: too much is waiting.
        """
        ...


def _count(request: dict[str, Any], names: Sequence[str], each: int, limit: int) -> None:
    """Refuses what asks for too much, before anything is tokenized."""
    count = each * max((len(request[name]) for name in names if isinstance(request.get(name), list)), default=0)
    if count > limit:
        raise RequestError(f"{count} texts in a request, and {limit} are allowed")


class Scores:
    """A reward model (``/score``) or a critic (``/values``).

    A reward is the model's output at a text's last token: a number, or a list where it has several outputs. A critic
    gives a list of numbers for each text: value t is its estimate after it has read token t.
    """

    def __init__(
        self, role: str, model: ScoreModel, texts: Texts, batch: BatchConfig, limit: int, measures: Measures
    ) -> None:
        self.path = "/score" if role == "reward" else "/values"
        self._critic, self._texts, self._limit = role == "critic", texts, limit
        self._batcher = Batcher[Int[np.ndarray, "T"], np.ndarray](
            model,
            most=model.rows,
            delay_s=batch.delay_ms / 1000,
            waiting=batch.waiting,
            observe=measures.batch,
        )
        measures.wait(lambda: self._batcher.waiting)
        self._reader = ThreadPoolExecutor(1, "texts")  # tokenizers are not for several threads at a time

    def start(self) -> None:
        """Begins to work, on the running event loop."""
        self._batcher.start()

    async def stop(self) -> None:
        """Ends the work under way."""
        await self._batcher.stop()
        self._reader.shutdown(wait=False)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """``rewards`` or ``values``, and ``exceeded``: which texts were too long and lost their beginning."""
        _count(request, ("samples", "sentences", "tokens"), 1, self._limit)
        loop = asyncio.get_running_loop()
        rows, exceeded = await loop.run_in_executor(self._reader, self._texts.rows, request)
        outputs = await self._batcher.submit(rows)
        if self._critic:
            return {"values": [of[:, 0].tolist() for of in outputs], "exceeded": exceeded}
        rewards = [of[-1].tolist() for of in outputs]
        return {"rewards": [r[0] if len(r) == 1 else r for r in rewards], "exceeded": exceeded}


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """A completion that is asked for."""

    tokens: list[int]
    text: str
    number: int


class Writings:
    """A judge (``/generate``): ``{"prompts": [text or turns], "votes": 1, "seed": 0}`` in, completions of each out.

    A completion is a function of weights, prompt, seed of server and request, and its number among the votes; not of
    what else is asked for at the time.
    """

    path = "/generate"

    def __init__(
        self,
        engine: Engine,
        params: Params,
        sampling: Sampling,
        texts: Texts,
        batch: BatchConfig,
        limit: int,
        measures: Measures,
        seed: int,
    ) -> None:
        self._engine, self._params, self._sampling = engine, params, sampling
        self._texts, self._limit, self._seed, self._measures = texts, limit, seed, measures
        self._batcher = Batcher[_Wanted, tuple[str, str]](
            self._write,
            most=max(batch.rows, engine.rows),
            delay_s=batch.delay_ms / 1000,
            waiting=batch.waiting,
            observe=measures.batch,
        )
        measures.wait(lambda: self._batcher.waiting)
        self._reader = ThreadPoolExecutor(1, "texts")

    def compile(self) -> None:
        """Compiles the engine's programs."""
        self._write([_Wanted([0], "", 0)])

    def start(self) -> None:
        """Begins to work, on the running event loop."""
        self._batcher.start()

    async def stop(self) -> None:
        """Ends the work under way."""
        await self._batcher.stop()
        self._reader.shutdown(wait=False)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """``completions``, a list of texts for each prompt, and ``finish``, how each of them ended."""
        votes, seed = (request.get(name, default) for name, default in (("votes", 1), ("seed", 0)))
        if type(votes) is not int or votes < 1:
            raise RequestError(f'"votes" = {votes!r}: expected a whole number of 1 or more')
        if type(seed) is not int:
            raise RequestError(f'"seed" = {seed!r}: expected a whole number')
        _count(request, ("prompts",), votes, self._limit)
        loop = asyncio.get_running_loop()
        texts, rows = await loop.run_in_executor(self._reader, self._texts.prompts, request)
        wanted = [
            _Wanted(row.tolist(), text, _number(text, seed, vote))
            for text, row in zip(texts, rows, strict=True)
            for vote in range(votes)
        ]
        found = await self._batcher.submit(wanted)
        by_prompt = [found[first : first + votes] for first in range(0, len(found), votes)]
        return {
            "completions": [[completion for completion, _ in some] for some in by_prompt],
            "finish": [[finish for _, finish in some] for some in by_prompt],
        }

    def _write(self, wanted: Sequence[_Wanted]) -> list[tuple[str, str]]:
        asks = [Ask(Prompt([], one.text, one.tokens, {}, "request", i), one.number) for i, one in enumerate(wanted)]
        results = self._engine.sample(self._params, asks, self._sampling, seed=self._seed)
        stats = self._engine.stats
        self._measures.computed(
            stats.tokens + stats.prompt_tokens,
            stats.computed - stats.tokens + stats.prompt_computed - stats.prompt_tokens,
        )
        return [(result.completion, result.finish) for result in results]


def _number(text: str, seed: int, vote: int) -> int:
    """A number of 31 bits for a completion, by which its tokens are drawn."""
    digest = hashlib.blake2b(f"{seed} {vote} {text}".encode("utf-8", "replace"), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
