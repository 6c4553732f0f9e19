"""Runs the rewards of a step, masks what is invalid, and mixes the rest by weight."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float32

from yatt_jax.errors import InputError, UserCodeFailure
from yatt_jax.rewards.choice import Choice
from yatt_jax.rewards.counts import Counts
from yatt_jax.rewards.spec import Failed, Invalid, RewardFn, RewardSpec, resolve

if TYPE_CHECKING:
    from yatt_jax.types import Sample

_log = logging.getLogger(__name__)


class RewardError(UserCodeFailure):
    """A reward function failed, or returned what is no reward.

    Attributes:
      sample: the sample that caused it; None where it cannot be told.
    """

    def __init__(self, message: str, sample: Sample | None = None) -> None:
        super().__init__(message)
        self.sample = sample


@dataclasses.dataclass(frozen=True)
class Scores:
    """Rewards of a step.

    Attributes:
      total: weighted sum, after ``Scorer.scales``; NaN where a reward that counts is invalid: such a sample is to be
        masked.
      rewards: each reward's own values by name, unweighted; NaN where invalid, or not asked for by the prompt.
      invalid: by name, how many values were None, NaN, infinite or ``Invalid``.
      errors: by name, how many samples raised an exception (with ``on_error="count"``).
      reasons: "name: reason" -> count, over both.
      counts: "name/what" -> what a reward counted since the last step (see ``rewards.counts``).
    """

    total: Float32[np.ndarray, "B"]
    rewards: dict[str, Float32[np.ndarray, "B"]]
    invalid: dict[str, int]
    errors: dict[str, int]
    reasons: dict[str, int]
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Scale:
    """What is taken out of a reward's values before they count: ``(value - mean) / deviation``."""

    mean: float = 0.0
    deviation: float = 1.0


@dataclasses.dataclass(frozen=True)
class _Reward:
    """A reward; one by a model is called once for all samples, by every process at the same time."""

    name: str
    spec: RewardSpec
    function: RewardFn
    by_model: bool = False


@dataclasses.dataclass(frozen=True)
class _Skipped:
    """Stands in a result for a sample whose prompt does not ask for the reward."""


_Value: TypeAlias = float | Invalid | Failed | _Skipped
_Results: TypeAlias = list[_Value]


def build(
    specs: Mapping[str, RewardSpec],
    *,
    on_error: Literal["raise", "count"] = "raise",
    workers: int = 1,
    models: Mapping[str, RewardFn] | None = None,
    column: str = "",
) -> Scorer:
    """Imports the rewards of a run and checks their arguments, before anything is sampled.

    Args:
      specs: by name.
      on_error: what an exception in a function does: "raise" stops with the sample that caused it, "count" masks the
        sample and counts.
      workers: threads that call reward functions; 1 calls them in the caller's thread.
      models: for each reward that names a model, the function that scores samples with it. It is called in the
        caller's thread, once for all samples of a step, also where there is none: processes compute together.
      column: of the prompts' records, which says what rewards each asks for (see ``Choice``); empty: all of them.

    Raises:
      InputError: a function that does not exist or does not take its arguments.
    """
    if not specs:
        raise InputError("rewards is empty: name at least one reward function")
    if not column and all(spec.weight == 0 for spec in specs.values()):
        raise InputError("rewards: every weight is 0, so there is nothing to learn from")
    of_models = models or {}
    rewards = [
        _Reward(name, spec, of_models[name] if spec.model.path else resolve(spec, name), bool(spec.model.path))
        for name, spec in specs.items()
    ]
    return Scorer(rewards, on_error, workers, Choice(column, {name: spec.weight for name, spec in specs.items()}))


class Scorer:
    """Scores samples; made by ``build``.

    Attributes:
      scales: by name, what is taken out of a reward's values before they are added up; none: nothing.
    """

    def __init__(
        self, rewards: Sequence[_Reward], on_error: Literal["raise", "count"], workers: int, choice: Choice
    ) -> None:
        self._rewards, self._on_error, self._choice = rewards, on_error, choice
        self.scales: dict[str, Scale] = {}
        self._pool = ThreadPoolExecutor(workers, "reward") if workers > 1 else None
        self._said: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The rewards' names, in the order of the configuration."""
        return [reward.name for reward in self._rewards]

    def close(self) -> None:
        """Stops the threads, and closes the rewards that can be."""
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for reward in self._rewards:
            close = getattr(reward.function, "close", None)
            if close is not None:
                close()

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Scores samples.

        An exception of a call with several samples is traced to its sample by calling the function again with each one
        alone; with ``on_error="count"`` the values of those calls are used.

        Raises:
          RewardError: an exception, if ``on_error`` is "raise"; always for a result of wrong length or type.
          InputError: the record of a sample lacks what a reward needs.
        """
        scoring = self.begin(len(samples))
        for place, sample in enumerate(samples):
            scoring.add(place, sample)
        return scoring.result()

    def begin(self, count: int) -> Scoring:
        """Starts to score ``count`` samples that become known one after another, in any order.

        With several workers, a call is made as soon as the samples of its chunk are there. Which samples share a call
        does not depend on the order in which they end.
        """
        return Scoring(self, count)

    def _calls(self, count: int) -> list[tuple[_Reward, range]]:
        """Each call's reward, and the places of its samples."""
        found = []
        for reward in self._rewards:
            if reward.by_model:
                found.append((reward, range(count)))
                continue
            size = reward.spec.chunk or max(count, 1)
            found += [(reward, range(first, min(first + size, count))) for first in range(0, count, size)]
        return found

    def _submit(self, reward: _Reward, samples: list[Sample]) -> Future[_Results] | None:
        """Makes a call on a worker; None where there are none, or where it is not for them."""
        return self._pool.submit(self._call, reward, samples) if self._pool and not reward.by_model else None

    def _mix(self, samples: Sequence[Sample], results: Mapping[str, _Results]) -> Scores:
        """Sums up what the rewards said."""
        total = np.zeros(len(samples), np.float32)
        scores = Scores(total, {}, {}, {}, {})
        reasons: Counter[str] = Counter()
        weights = [self._choice.weights(sample) for sample in samples]
        for reward in self._rewards:
            values, spec = results[reward.name], reward.spec
            array = np.asarray([v if isinstance(v, float) else np.nan for v in values], np.float32)
            array[~np.isfinite(array)] = np.nan
            faults = [v for v in values if isinstance(v, Invalid | Failed)]
            failed = sum(isinstance(v, Failed) for v in faults)
            skipped = sum(isinstance(v, _Skipped) for v in values)
            reasons.update(f"{reward.name}: {fault.reason}" for fault in faults)
            scores.rewards[reward.name] = array
            scores.errors[reward.name] = failed
            scores.invalid[reward.name] = int(np.isnan(array).sum()) - failed - skipped
            weight = np.asarray([of.get(reward.name, 0.0) for of in weights], np.float32)
            counted = weight != 0  # 0 * NaN would be NaN
            scale = self.scales.get(reward.name, Scale(spec.mean, spec.std))
            total[counted] += weight[counted] * (
                (array[counted] - np.float32(scale.mean)) / np.float32(scale.deviation)
            )
            found = getattr(reward.function, "counts", None)
            if isinstance(found, Counts):
                scores.counts.update({f"{reward.name}/{what}": number for what, number in found.take().items()})
        scores.reasons.update(reasons)
        for reason in reasons:
            if reason not in self._said:
                self._said.add(reason)
                _log.warning("reward %s (the sample is masked; further ones are counted and not shown)", reason)
        return scores

    def _call(self, reward: _Reward, samples: list[Sample]) -> _Results:
        """What a reward says of those of the samples that ask for it."""
        asks = [reward.name in self._choice.weights(sample) for sample in samples]
        if reward.by_model:  # every process calls it as often as the others, and for all of its samples
            answers = _values(reward, samples, reward.function(samples))
            return [value if wanted else _Skipped() for value, wanted in zip(answers, asks, strict=True)]
        values = iter(self._ask(reward, [sample for sample, wanted in zip(samples, asks, strict=True) if wanted]))
        return [next(values) if wanted else _Skipped() for wanted in asks]

    def _ask(self, reward: _Reward, samples: list[Sample]) -> _Results:
        if not samples:
            return []
        try:
            values = _values(reward, samples, reward.function(samples))
            for sample, value in zip(samples, values, strict=True):
                if isinstance(value, Failed) and self._on_error == "raise":
                    raise RewardError(_message(reward, f"failed: {value.reason}", None, sample), sample)
            return values
        except (InputError, RewardError):
            raise
        except Exception as error:
            if len(samples) > 1:
                values = [value for sample in samples for value in self._ask(reward, [sample])]
                if self._on_error == "raise":  # none of them raised alone
                    raise RewardError(_message(reward, f"failed on {len(samples)} samples together", error)) from error
                return values
            reason = f"{type(error).__name__}: {error}"
            if self._on_error == "count":
                return [Failed(reason)]
            raise RewardError(_message(reward, "failed", error, samples[0]), samples[0]) from error


class Scoring:
    """Samples on their way to scores; made by ``Scorer.begin``."""

    def __init__(self, scorer: Scorer, count: int) -> None:
        self._scorer = scorer
        self._samples: list[Sample | None] = [None] * count
        self._calls = scorer._calls(count)
        self._missing = [len(places) for _, places in self._calls]
        self._running: dict[int, Future[_Results]] = {}
        self._dropped: set[int] = set()

    def add(self, place: int, sample: Sample) -> None:
        """Takes a sample that has ended.

        Raises:
          RewardError: a call for earlier samples failed, and the scorer does not count failures.
        """
        self._samples[place] = sample
        self._settle(place)
        for future in self._running.values():
            if future.done():
                future.result()  # raises what it raised: there is no need to sample the rest

    def drop(self, place: int) -> None:
        """Says that there will be no sample here: the result is without it."""
        self._dropped.add(place)
        self._settle(place)

    def _settle(self, place: int) -> None:
        """Makes the calls that waited for this place alone."""
        for number, (reward, places) in enumerate(self._calls):
            if place in places:
                self._missing[number] -= 1
                if not self._missing[number]:
                    future = self._scorer._submit(reward, self._of(places))
                    if future is not None:
                        self._running[number] = future

    def result(self) -> Scores:
        """The scores of all samples that were not dropped, in the order of their places.

        Raises:
          RewardError: an exception, if the scorer does not count them; always for a result of wrong length or type.
          InputError: the record of a sample lacks what a reward needs.
        """
        results: dict[str, _Results] = {name: [] for name in self._scorer.names}
        for number, (reward, places) in enumerate(self._calls):
            future = self._running.get(number)
            results[reward.name] += self._scorer._call(reward, self._of(places)) if future is None else future.result()
        return self._scorer._mix(self._of(range(len(self._samples))), results)

    def _of(self, places: range) -> list[Sample]:
        wanted = [place for place in places if place not in self._dropped]
        missing = [place for place in wanted if self._samples[place] is None]
        if missing:
            raise ValueError(f"sample {missing[0]} was not added")
        return [sample for place in wanted if (sample := self._samples[place]) is not None]


def _values(reward: _Reward, samples: list[Sample], result: Any) -> _Results:
    """The numbers in a function's result; never integers, so that no fraction can be lost.

    Raises:
      RewardError: not one number a sample.
    """
    try:
        items = list(result)
    except TypeError:
        items = None
    if items is None or len(items) != len(samples):
        found = type(result).__name__ if items is None else f"{len(items)} values"
        raise RewardError(_message(reward, f"returned {found} for {len(samples)} samples"))
    values: _Results = []
    for sample, item in zip(samples, items, strict=True):
        scalar = getattr(item, "ndim", 0) == 0 and hasattr(item, "dtype")
        if item is None:
            values.append(float("nan"))
        elif isinstance(item, Invalid | Failed):
            values.append(item)
        elif (isinstance(item, Number) and not isinstance(item, complex)) or scalar:
            values.append(float(item))  # type: ignore[arg-type]
        else:
            what = f"returned {item!r} ({type(item).__name__}) where a number, None, Invalid or Failed was expected"
            raise RewardError(_message(reward, what, None, sample), sample)
    return values


def _message(reward: _Reward, what: str, error: Exception | None = None, sample: Sample | None = None) -> str:
    lines = [f"reward {reward.name!r} ({reward.spec.fn or reward.spec.model.path}) {what}"]
    if error is not None:
        lines[0] += f": {type(error).__name__}: {error}"
    if sample is not None:
        lines.append(f"  sample {sample.sample_id} of the prompt in {sample.prompt.source}")
        lines.append(f"  prompt: {_short(sample.prompt.text)}")
        lines.append(f"  completion: {_short(sample.completion)}")
    return "\n".join(lines)


def _short(text: str, limit: int = 500) -> str:
    shown = repr(text)
    return shown if len(shown) <= limit else f"{shown[:limit]}... ({len(text)} characters)"
