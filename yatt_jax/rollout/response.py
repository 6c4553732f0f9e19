"""A response on its way: what the devices have drawn of it, and where its text stops."""

from __future__ import annotations

import numpy as np

from yatt_jax.rollout import device
from yatt_jax.rollout.assemble import Result
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.rollout.slots import Request
from yatt_jax.rollout.stops import Stop, Tokenizer, find_stop, text_of

_FINISH = {device.RUNNING: "unfinished", device.STOP: "stop", device.LENGTH: "length", device.INVALID: "invalid"}


class Response:
    """Collects the tokens of a request chunk by chunk.

    Args:
      request: what is answered.
      begun: what was written before, or None.

    Attributes:
      request: what is answered.
      stop: where a stop string ends it, once one was seen.
    """

    def __init__(self, request: Request, begun: Result | None):
        self.request = request
        self.stop: Stop | None = None
        self._tokens: list[int] = [] if begun is None else begun.tokens.tolist()
        self._sampled = [] if begun is None else [begun.sampled]
        self._plain = [] if begun is None else [begun.plain]
        self._kept = [] if begun is None or begun.kept is None else [begun.kept]
        self._checked = 0
        self._reason = device.RUNNING

    @property
    def runs(self) -> bool:
        """Whether the devices would write more."""
        return self._reason == device.RUNNING

    def take(self, drawn: device.Drawn, at: int, reason: int) -> None:
        """Takes in what a chunk drew for slot ``at``; ``reason`` is the state of the row after it."""
        count = int(drawn.count[at])
        self._tokens += np.asarray(drawn.tokens[at, :count]).tolist()
        self._sampled.append(np.asarray(drawn.sampled_logprobs[at, :count]))
        self._plain.append(np.asarray(drawn.plain_logprobs[at, :count]))
        if drawn.kept is not None:
            self._kept.append(np.array(drawn.kept[at, :count]))
        self._reason = reason

    def look(self, tokenizer: Tokenizer, sampling: Sampling) -> None:
        """Looks for stop strings in what is new."""
        if sampling.stop:
            least = sampling.min_new_tokens
            self.stop = find_stop(tokenizer, self._tokens, sampling.stop, checked=self._checked, min_new_tokens=least)
            self._checked = len(self._tokens)

    def result(self, tokenizer: Tokenizer) -> Result:
        """The response as far as it goes, cut at a stop string."""
        stop = self.stop
        n = len(self._tokens) if stop is None else stop.tokens
        finish = _FINISH[self._reason] if stop is None else "stop_string"
        text = text_of(tokenizer, self._tokens[:n]) if stop is None else stop.text

        def joined(parts: list[np.ndarray]) -> np.ndarray:
            return np.concatenate([np.zeros(0, np.float32), *parts])[:n]

        kept = np.concatenate(self._kept)[:n] if self._kept else None
        tokens = np.array(self._tokens[:n], np.int32)
        return Result(tokens, joined(self._sampled), joined(self._plain), kept, finish, text)
