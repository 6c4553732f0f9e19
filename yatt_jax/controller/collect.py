"""Collects the groups that a step trains on: which prompts are drawn, which responses waited for, and which kept.

Four ways (``RolloutConfig.tail``), all with the same state between steps: groups that wait, whole or not.

    wait    every response is sampled to its end. With ``dynamic``, groups without a signal are dropped and others drawn
            in waves; whole groups that a step has no use for are kept while they are fresh enough.
    abort   more prompts are drawn than a step needs, and the slowest groups are given up.
    carry   the same, but what is not whole goes on in the next step, under newer weights; nothing is given up.
    ahead   the groups of later steps are sampled before they are needed, so that their rewards come in meanwhile.

What a process decides depends on its own decode steps and on agreed counts, never on the clock: a run repeats itself.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from yatt_jax.config import OnlineRun
from yatt_jax.controller.hosts import Hosts, Sums
from yatt_jax.data.prompts import PromptSource
from yatt_jax.errors import RunFailure
from yatt_jax.rewards import Scorer, Scores, Scoring
from yatt_jax.rollout.assemble import Result
from yatt_jax.rollout.dynamic import explain, judge, observed, wave_size
from yatt_jax.rollout.engine import Ask, to_sample
from yatt_jax.rollout.held import Group, ended
from yatt_jax.types import Params, Sample

_log = logging.getLogger(__name__)


class Actor(Protocol):
    """What the collector samples with."""

    def laid_out(self) -> contextlib.AbstractContextManager[Params]:
        """The actor's weights, laid out for sampling as long as the block runs."""
        ...

    def respond(
        self,
        params: Params,
        asked: Sequence[Ask],
        finished: Callable[[int, Result], None],
        enough: Callable[[int], bool] | None,
    ) -> list[Result]:
        """Samples responses; see ``Engine.sample``. Every process calls it as often as the others."""
        ...

    def timed(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A part of the rollout, for the timeline."""
        ...


@dataclasses.dataclass(frozen=True)
class Collected:
    """This process's rows of a step: the responses of each group side by side.

    Attributes:
      groups: whole, scored, in the order of the step.
      samples: their responses; ``Sample.group`` counts the groups of all processes from 0.
      scores: of the samples; counts are of everything that was scored in the step.
      sums: figures of this process, to be added over processes.
    """

    groups: list[Group]
    samples: list[Sample]
    scores: Scores
    sums: Sums


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Groups that were sampled together.

    Attributes:
      version: step whose weights wrote them last.
      groups: some of them whole.
      scoring: of those that are; None: not begun.
    """

    version: int
    groups: list[Group]
    scoring: Scoring | None


class Collector:
    """See the module.

    Args:
      config: of the run.
      source: the prompts.
      scorer: the rewards.
      hosts: this process among those of the job.
      actor: what samples.
    """

    def __init__(self, config: OnlineRun, source: PromptSource, scorer: Scorer, hosts: Hosts, actor: Actor):
        self._config, self._options = config, config.rollout
        self._source, self._scorer, self._hosts, self._actor = source, scorer, hosts, actor
        self._held: list[Group] = []
        self._ahead: dict[int, _Batch] = {}
        self._ratio = 0.0
        self._said = False
        self._begin()

    def _begin(self) -> None:
        """Nothing is counted yet."""
        self._faults = {kind: collections.Counter[str]() for kind in ("invalid", "errors", "reasons", "counts")}
        self._sums: Sums = {}

    def collect(self, step: int) -> Collected:
        """The groups of a step, counted from 0. All processes call it for the same steps.

        Raises:
          RewardError: a reward failed, and failures are not counted.
          DataError: a prompt that cannot be used, and that the settings do not allow to skip.
          RunFailure: too few groups with a signal, and ``dynamic.shortfall`` is "fail".
        """
        self._begin()
        old = [group for group in self._held if step - group.version > self._options.max_staleness]
        self._held = [group for group in self._held if group not in old]
        if self._options.tail == "ahead":
            groups, positions = self._next_batch(step)
        elif self._options.dynamic.enabled:
            groups, positions = self._in_waves(step)
        else:
            groups, positions = self._once(step)
        if self._options.max_staleness:
            self._add("groups_too_old", len(old))
            self._add("groups_held", len(self._held))
            rows = self._options.samples_per_prompt * len(groups)
            ages = sum(step - group.version for group in groups)
            self._sums["staleness"] = float(ages * self._options.samples_per_prompt), rows
        return self._assembled(groups, positions)

    # Ways to collect.

    def _next_batch(self, step: int) -> tuple[list[Group], list[int]]:
        """The groups that were sampled for this step, after those of steps to come were begun."""
        last = min(step + self._options.max_staleness, self._config.steps - 1)
        for number, batch in list(self._ahead.items()):
            if number < step or number - batch.version > self._options.max_staleness:
                del self._ahead[number]
        missing = [number for number in range(step, last + 1) if number not in self._ahead]
        if missing:
            with self._actor.laid_out() as params:
                for number in missing:
                    self._ahead[number] = self._sample(params, self._draw(self._options.prompts, step), step)
        groups = self._scored(self._ahead.pop(step))
        return groups, [group.number % self._options.prompts for group in groups]

    def _once(self, step: int) -> tuple[list[Group], list[int]]:
        """One draw; with a tail that is cut, sampling ends when enough groups are whole."""
        options = self._options
        if options.tail == "wait":
            with self._actor.laid_out() as params:
                batch = self._sample(params, self._draw(options.prompts, step), step)
            groups = self._scored(batch)
            return groups, [group.number % options.prompts for group in groups]
        held = sum(self._hosts.gather("groups that wait", len(self._held)))
        drawn = self._draw(max(0, options.prompts + options.extra_prompts - held), step)
        whole = [group for group in self._held if group.whole]
        going = [group for group in self._held if not group.whole] + drawn
        counts = self._hosts.gather("groups on their way", [len(whole), len(going)])
        ready, away = (sum(values) for values in zip(*counts, strict=True))
        share = -(-max(0, options.prompts - ready) * len(going) // max(1, away))
        overdue = [group.number for group in going if step - group.version >= options.max_staleness > 0]
        with self._actor.laid_out() as params:
            batch = self._sample(params, going, step, _Enough(share, options.budget, overdue, bool(whole)))
        pool = whole + self._scored(batch)
        cut = [group for group in batch.groups if not group.whole]
        groups, positions, rest = self._settle(pool)
        carries = options.tail == "carry"
        self._held = cut + rest if carries else []
        rows = [result for group in cut for result in group.results]
        written = sum(0 if result is None else len(result.tokens) for result in rows)
        name = "carried" if carries else "aborted"
        self._add(f"rows_{name}", len(rows))
        self._sums[f"{name}_tokens"] = float(written), len(rows)  # of a row, when it was stopped
        return groups, positions

    def _in_waves(self, step: int) -> tuple[list[Group], list[int]]:
        """Draws until enough groups have a signal; see ``rollout.dynamic``."""
        options, dynamic = self._options, self._options.dynamic
        pool, self._held, dropped = self._held, [], []
        verdicts: collections.Counter[Any] = collections.Counter()
        waves, have = 0, sum(self._hosts.gather("groups that wait", len(pool)))
        with contextlib.ExitStack() as stack:
            params = None
            while count := wave_size(self._ratio, dynamic, wanted=options.prompts, have=have, waves=waves):
                params = stack.enter_context(self._actor.laid_out()) if waves == 0 else params
                groups = self._scored(self._sample(params, self._draw(count, step), step))
                judged = [judge(list(map(float, group.total))) for group in groups if group.total is not None]
                pool += [group for group, verdict in zip(groups, judged, strict=True) if verdict == "signal"]
                dropped += [group for group, verdict in zip(groups, judged, strict=True) if verdict != "signal"]
                found: collections.Counter[Any] = collections.Counter()
                for own in self._hosts.gather("groups with a signal", dict(collections.Counter(judged))):
                    found.update(own)
                self._ratio = observed(self._ratio, dynamic, drawn=count, with_signal=found["signal"])
                verdicts += found
                have, waves = have + found["signal"], waves + 1
        if have < options.prompts:
            self._come_short(explain(verdicts.elements(), wanted=options.prompts, have=have, waves=waves))
        groups, positions, rest = self._settle(
            pool, dropped, least=options.prompts if dynamic.shortfall == "fill" else 1
        )
        self._held = rest if options.max_staleness else []
        main = self._hosts.is_main  # what all know is counted once
        self._sums["waves"] = float(waves), 1
        self._sums["prompts_a_group"] = self._ratio, 1
        for name in ("all_zero", "all_one", "all_equal", "invalid"):
            self._sums[f"drawn_{name}"] = float(verdicts[name] if main else 0), verdicts.total() if main else 0
        return groups, positions

    def _come_short(self, message: str) -> None:
        if self._options.dynamic.shortfall == "fail":
            raise RunFailure(message)
        if not self._said and self._hosts.is_main:
            _log.warning("%s (further steps that come short are not shown)", message)
        self._said = True

    # Their parts.

    def _draw(self, count: int, step: int) -> list[Group]:
        """New groups, nothing of them written: this process's share of ``count``."""
        draw = self._source.draw(count)
        nothing = (None,) * self._options.samples_per_prompt
        self._add("groups_drawn", len(draw.prompts))
        return [
            Group(number, place, prompt, step, nothing)
            for number, place, prompt in zip(draw.numbers, draw.places, draw.prompts, strict=True)
        ]

    def _sample(self, params: Params, groups: Sequence[Group], step: int, enough: _Enough | None = None) -> _Batch:
        """Samples what has not ended. Rewards begin as soon as a response has, or its group where some are cut."""
        G = self._options.samples_per_prompt
        results = [list(group.results) for group in groups]
        places = [(g, i) for g, row in enumerate(results) for i, result in enumerate(row) if not ended(result)]
        asked = [Ask(groups[g].prompt, groups[g].number * G + i, results[g][i]) for g, i in places]
        scoring = self._scorer.begin(len(groups) * G)

        def add(g: int, i: int, result: Result) -> None:
            ask = Ask(groups[g].prompt, groups[g].number * G + i)
            scoring.add(g * G + i, to_sample(ask, result, groups[g].number))

        def finished(number: int, result: Result) -> None:
            g, i = places[number]
            results[g][i] = result
            if enough is None:
                add(g, i, result)
            elif all(map(ended, results[g])):
                enough.count(groups[g].number)
                for sibling, written in enumerate(results[g]):
                    if written is not None:
                        add(g, sibling, written)

        for (g, i), result in zip(places, self._actor.respond(params, asked, finished, enough), strict=True):
            results[g][i] = result
        after = [dataclasses.replace(group, results=tuple(r)) for group, r in zip(groups, results, strict=True)]
        for g, group in enumerate(after):
            if not group.whole:
                for i in range(G):
                    scoring.drop(g * G + i)
        return _Batch(step, after, scoring)

    def _scored(self, batch: _Batch) -> list[Group]:
        """The whole groups of a batch with their rewards; NaN for a response whose logits were not finite."""
        whole = [group for group in batch.groups if group.whole]
        with self._actor.timed("reward"):
            if batch.scoring is None:  # what was scored before the run was stopped is scored again
                samples = [sample for group in whole for sample in self._samples(group, group.number)]
                scores = self._scorer(samples)
            else:
                scores = batch.scoring.result()
        for kind, counter in self._faults.items():
            counter.update(getattr(scores, kind))
        G, found = self._options.samples_per_prompt, []
        for number, group in enumerate(whole):
            rows = slice(number * G, (number + 1) * G)
            broken = np.array([result.finish == "invalid" for result in group.ended_results()], bool)
            total = np.where(broken, np.float32(np.nan), scores.total[rows])
            rewards = {name: values[rows] for name, values in scores.rewards.items()}
            found.append(dataclasses.replace(group, total=total, rewards=rewards))
        return found

    def _settle(
        self, pool: Sequence[Group], spare: Sequence[Group] = (), least: int = 1
    ) -> tuple[list[Group], list[int], list[Group]]:
        """Picks the groups of the step from those of all processes: the oldest first.

        Args:
          pool: of this process.
          spare: taken, in the same order, where the pools have fewer than ``least`` groups.
          least: see there.

        Returns:
          This process's groups of the step, the place of each among those of all, and what is left of the pool.
        """
        offers = self._hosts.gather("groups of a step", [[g.order for g in groups] for groups in (pool, spare)])
        first, second = (sorted(tuple(order) for own in offers for order in own[i]) for i in (0, 1))
        chosen = first[: self._options.prompts]
        chosen += second[: max(0, least - len(chosen))]
        place = {order: i for i, order in enumerate(sorted(chosen))}
        used = sorted((g for g in (*pool, *spare) if g.order in place), key=lambda g: g.order)
        self._add("groups_missing", self._options.prompts - len(chosen) if self._hosts.is_main else 0)
        return used, [place[g.order] for g in used], [g for g in pool if g.order not in place]

    def _assembled(self, groups: list[Group], positions: Sequence[int]) -> Collected:
        samples = [s for g, position in zip(groups, positions, strict=True) for s in self._samples(g, position)]
        empty = np.zeros(0, np.float32)

        def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
            return np.concatenate([empty, *parts])

        scores = Scores(
            total=joined([group.total for group in groups if group.total is not None]),
            rewards={name: joined([group.rewards[name] for group in groups]) for name in self._scorer.names},
            invalid={name: self._faults["invalid"][name] for name in self._scorer.names},
            errors={name: self._faults["errors"][name] for name in self._scorer.names},
            reasons=dict(self._faults["reasons"]),
            counts=dict(self._faults["counts"]),
        )
        return Collected(groups, samples, scores, self._sums)

    def _samples(self, group: Group, position: int) -> list[Sample]:
        G = self._options.samples_per_prompt
        asks = [Ask(group.prompt, group.number * G + i) for i in range(G)]
        return [to_sample(ask, r, position) for ask, r in zip(asks, group.ended_results(), strict=True)]

    def _add(self, name: str, count: float) -> None:
        if self._options.tail != "wait" or self._options.dynamic.enabled:
            self._sums[name] = self._sums.get(name, (0.0, None))[0] + float(count), None

    # Nothing lost.

    def state(self) -> dict[str, Any]:
        """What this process holds between two steps, as plain JSON values."""
        ahead = {
            str(step): {"version": batch.version, "groups": [group.to_json() for group in batch.groups]}
            for step, batch in self._ahead.items()
        }
        return {"held": [group.to_json() for group in self._held], "ahead": ahead, "ratio": self._ratio}

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from the states of all processes, with any number of them."""
        if not states:  # saved before there was such a state
            return
        self._ratio = states[0]["ratio"]
        self._held = self._taken([group for state in states for group in state["held"]])
        for step, batch in states[0]["ahead"].items():
            saved = [group for state in states for group in state["ahead"][step]["groups"]]
            self._ahead[int(step)] = _Batch(batch["version"], self._taken(saved), None)

    def _taken(self, saved: Sequence[Mapping[str, Any]]) -> list[Group]:
        """This process's share of saved groups."""
        own = [group for group in saved if self._source.owns(group["number"])]
        prompts = self._source.read([group["place"] for group in own])
        found = [Group.from_json(group, prompt) for group, prompt in zip(own, prompts, strict=True)]
        return sorted(found, key=lambda group: group.order)


class _Enough:
    """Whether a process may stop sampling; asked between chunks.

    Args:
      share: groups that it is to bring.
      budget: decode steps after which it stops with fewer, but not with none; 0: never.
      overdue: groups that it may not stop before they are whole.
      some: whether it has whole groups beside these.
    """

    def __init__(self, share: int, budget: int, overdue: Sequence[int], some: bool):
        self._share, self._budget, self._some = share, budget, some
        self._overdue, self._whole = set(overdue), 0

    def count(self, number: int) -> None:
        """A group is whole."""
        self._whole += 1
        self._overdue.discard(number)

    def __call__(self, steps: int) -> bool:
        if self._overdue:
            return False
        spent = 0 < self._budget <= steps and (self._some or self._whole > 0)
        return spent or self._whole >= self._share
