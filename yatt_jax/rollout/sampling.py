"""How tokens are sampled: everything here is a traced value, and changing it compiles nothing."""

from __future__ import annotations

import dataclasses
import math

# Width of the array of stop ids that the device compares each token with.
MAX_STOP_IDS = 16


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a batch.

    Attributes:
      temperature: logits are divided by it; 0 is greedy (the largest logit, without filters).
      top_k: keep the k largest logits; 0 keeps all.
      top_p: then keep the largest probabilities until their sum reaches top_p; 1 keeps all.
      min_p: then keep probabilities of at least min_p times the largest; 0 keeps all.
      min_new_tokens: until a response has so many tokens, stop ids are not drawn and stop strings do not count.
      max_new_tokens: a response of so many tokens is cut ("length").
      stop: strings that end a response; the completion is cut before the first of them.
      stop_token_ids: ids that end a response (at most 16); the stop token is part of the response.

    Raises:
      ValueError: a value out of its range; the message names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_new_tokens: int = 0
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(isinstance(self.stop, tuple | list), "stop", self.stop, "a tuple of strings")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            _check(number, name, value, "a finite number")
        for name in ("top_k", "min_new_tokens", "max_new_tokens"):
            value = getattr(self, name)
            _check(isinstance(value, int) and not isinstance(value, bool), name, value, "a whole number")
        # Below that, dividing by the temperature overflows for ordinary logits.
        warm = self.temperature == 0 or self.temperature >= 1e-3
        _check(warm, "temperature", self.temperature, "0 (greedy) or at least 0.001")
        _check(0 <= self.top_k < 2**31, "top_k", self.top_k, "0 (off) or more")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (off)")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 (off) and 1")
        _check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        bounded = 0 <= self.min_new_tokens <= self.max_new_tokens
        limits = f"between 0 and max_new_tokens ({self.max_new_tokens})"
        _check(bounded, "min_new_tokens", self.min_new_tokens, limits)
        _check(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "a tuple of strings, none empty")
        _check(all(i >= 0 for i in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "ids of 0 or more")
        few = len(self.stop_token_ids) <= MAX_STOP_IDS
        _check(few, "stop_token_ids", self.stop_token_ids, f"at most {MAX_STOP_IDS} ids; use stop strings for more")


def _check(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"sampling.{name} = {value!r}: it must be {expected}")
