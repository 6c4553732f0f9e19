"""What a step collects, with a sampler whose responses have lengths and rewards by their number; nothing compiles."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.controller import tiny
from yatt_jax.config import ConfigError, OnlineRun, parse
from yatt_jax.controller.collect import Collected, Collector
from yatt_jax.controller.hosts import Hosts
from yatt_jax.data import tokenizer as tokenizers
from yatt_jax.data.prompts import PromptSource
from yatt_jax.errors import RunFailure
from yatt_jax.rewards import build
from yatt_jax.rollout.assemble import Result
from yatt_jax.rollout.engine import Ask
from yatt_jax.types import Sample

CHUNK, PROMPTS, SAMPLES = 4, 4, 2


def length_of(number: int) -> int:
    """Of a response: short ones, and now and then one of 40 tokens."""
    return 40 if number % 11 == 5 else 3 + number * 7 % 9


def by_number(samples: Sequence[Sample]) -> list[float]:
    """Groups whose number divides by 3 have a signal, the others none."""
    return [float(s.sample_id % SAMPLES) if s.sample_id // SAMPLES % 3 == 0 else float(s.group >= 0) for s in samples]


class Sampler:
    """Writes ``CHUNK`` tokens of every response at a time: token t of a response is the version that wrote it."""

    def __init__(self) -> None:
        self.version, self.layouts, self.steps = 0, 0, 0

    @contextlib.contextmanager
    def laid_out(self) -> Iterator[Any]:
        self.layouts += 1
        yield None

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        assert name == "reward"
        yield

    def respond(
        self,
        params: Any,
        asked: Sequence[Ask],
        finished: Callable[[int, Result], None],
        enough: Callable[[int], bool] | None,
    ) -> list[Result]:
        assert params is None
        results = [ask.begun or _result([], False) for ask in asked]
        steps = 0
        while any(r.finish == "unfinished" for r in results) and not (enough and enough(steps)):
            for i, ask in enumerate(asked):
                if results[i].finish == "unfinished":
                    whole = length_of(ask.sample_id)
                    tokens = [*results[i].tokens.tolist(), *[self.version] * CHUNK][:whole]
                    results[i] = _result(tokens, len(tokens) == whole)
                    if len(tokens) == whole:
                        finished(i, results[i])
            steps += CHUNK
        self.steps = steps
        return results


def _result(tokens: list[int], done: bool) -> Result:
    logprobs = -np.arange(len(tokens), dtype=np.float32)
    return Result(np.array(tokens, np.int32), logprobs, logprobs, None, "stop" if done else "unfinished", "a")


class Fellows:
    """Processes that are threads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=20)
        self._said: list[Any] = [None] * count

    def member(self, process: int) -> Any:
        class Member:
            is_main, count = process == 0, self.count

            def gather(_, name: str, value: Any) -> list[Any]:
                self._said[process] = name, json.loads(json.dumps(value))
                self._barrier.wait()
                found = list(self._said)
                self._barrier.wait()
                assert {other for other, _ in found} == {name}
                return [given for _, given in found]

        member = Member()
        member.process = process  # type: ignore[attr-defined]
        return member


def options(folder: Path, **changes: Any) -> OnlineRun:
    common = {
        "rollout__prompts": PROMPTS,
        "rollout__samples_per_prompt": SAMPLES,
        "steps": 12,
        "rewards": {"number": {"fn": "tests.controller.test_collect:by_number"}},
        "hyper__correction__how": "truncate",
    }
    found = parse(tiny.config(folder, **common, **{f"rollout__{key}": value for key, value in changes.items()}))
    assert isinstance(found, OnlineRun)
    return found


class Team:
    """A collector for each process."""

    def __init__(self, config: OnlineRun, count: int = 1) -> None:
        fellows = Fellows(count)
        self.samplers = [Sampler() for _ in range(count)]
        tokenizer = tokenizers.load_tokenizer(config.model.tokenizer)
        self.sources = [
            PromptSource(config.data, tokenizer, prompts_per_step=PROMPTS, seed=3, process_index=i, process_count=count)
            for i in range(count)
        ]
        self.collectors = [
            Collector(config, source, build(config.rewards), Hosts() if count == 1 else fellows.member(i), sampler)
            for i, (source, sampler) in enumerate(zip(self.sources, self.samplers, strict=True))
        ]

    def step(self, step: int) -> list[Collected]:
        for sampler in self.samplers:
            sampler.version = step
        with ThreadPoolExecutor(len(self.collectors)) as pool:
            return list(pool.map(lambda collector: collector.collect(step), self.collectors))

    def numbers(self, step: int) -> list[int]:
        """Groups of a step, by their place in it."""
        return _order(self.step(step))

    def save(self) -> tuple[list[Any], list[Any]]:
        saved = [c.state() for c in self.collectors], [source.state() for source in self.sources]
        return json.loads(json.dumps(saved))

    def restore(self, saved: tuple[list[Any], list[Any]]) -> None:
        for collector, source in zip(self.collectors, self.sources, strict=True):
            source.restore(saved[1])
            collector.restore(saved[0])


def _order(found: Sequence[Collected]) -> list[int]:
    """Prompt numbers of a step's groups by their place among those of all processes."""
    places = {}
    for own in found:
        assert [s.sample_id for s in own.samples] == [
            g.number * SAMPLES + i for g in own.groups for i in range(SAMPLES)
        ]
        assert len(own.scores.total) == len(own.samples) == len(own.scores.rewards["number"])
        for group, first in zip(own.groups, own.samples[::SAMPLES], strict=True):
            assert group.whole
            assert first.group not in places
            assert group.total is not None
            expected = by_number([s for s in own.samples if s.sample_id // SAMPLES == group.number])
            assert group.total.tolist() == expected
            places[first.group] = group.number
    assert sorted(places) == list(range(len(places)))
    return [places[i] for i in range(len(places))]


def total(found: Sequence[Collected], name: str) -> float:
    return sum(own.sums[name][0] for own in found)


def test_waiting_takes_every_prompt_in_turn(tmp_path: Path) -> None:
    team = Team(options(tmp_path), 2)
    assert [team.numbers(step) for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert team.samplers[0].layouts == 3


def test_abort_gives_up_the_slowest(tmp_path: Path) -> None:
    team = Team(options(tmp_path, tail="abort", extra_prompts=2))
    used: list[int] = []
    aborted = 0.0
    for step in range(6):
        found = team.step(step)
        used += _order(found)
        aborted += total(found, "rows_aborted")
        assert total(found, "groups_drawn") == PROMPTS + 2
        assert team.samplers[0].steps < 40  # nobody waited for a long one
    assert len(used) == len(set(used)) == 6 * PROMPTS
    assert aborted > 0
    slow = {n for n in range(36) if max(length_of(SAMPLES * n + i) for i in range(SAMPLES)) == 40}
    assert not slow & set(used)  # which is the bias that the figures show
    assert team.save()[0][0]["held"] == []


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_carrying_loses_nothing_and_keeps_the_bound(tmp_path: Path, processes: int) -> None:
    team = Team(options(tmp_path, tail="carry", extra_prompts=2, max_staleness=2), processes)
    used: list[int] = []
    ages = set()
    for step in range(12):
        found = team.step(step)
        used += _order(found)
        for group in (group for own in found for group in own.groups):
            ages.add(step - group.version)
            for i, result in enumerate(group.ended_results()):
                number = SAMPLES * group.number + i
                assert len(result.tokens) == length_of(number)
                # Written under the weights of their steps, none of them twice; log-probabilities in their places.
                assert result.tokens.tolist() == sorted(result.tokens.tolist())
                assert result.tokens[0] >= group.version
                np.testing.assert_array_equal(result.sampled, -np.arange(len(result.tokens)))
    assert len(used) == len(set(used)) == 12 * PROMPTS
    assert {0, 1} <= ages <= {0, 1, 2}
    held = {group["number"] for own in team.save()[0] for group in own["held"]}
    drawn = team.sources[0].state()["drawn"]
    assert set(used) | held == set(range(drawn))  # none was lost
    assert not held & set(used)


def test_a_budget_ends_a_step_with_fewer_rows(tmp_path: Path) -> None:
    team = Team(options(tmp_path, tail="carry", budget=8, max_staleness=3))
    used: list[int] = []
    missing = 0.0
    for step in range(8):
        found = team.step(step)
        used += _order(found)
        missing += total(found, "groups_missing")
        overdue = any(group.version == step - 3 for own in found for group in own.groups)
        assert team.samplers[0].steps <= 8 or overdue
    assert missing > 0
    assert len(used) == len(set(used)) == 8 * PROMPTS - missing


@pytest.mark.parametrize("ahead", [1, 3])
def test_ahead_samples_before_it_is_needed(tmp_path: Path, ahead: int) -> None:
    team = Team(options(tmp_path, tail="ahead", max_staleness=ahead), 2)
    for step in range(12):
        found = team.step(step)
        assert _order(found) == list(range(PROMPTS * step, PROMPTS * (step + 1)))
        versions = {group.version for own in found for group in own.groups}
        assert versions == {max(0, step - ahead)}
    assert team.sources[0].state()["drawn"] == 12 * PROMPTS  # nothing beyond the last step
    assert team.samplers[0].layouts == 12 - ahead


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_waves_bring_groups_with_a_signal(tmp_path: Path, processes: int) -> None:
    team = Team(options(tmp_path, dynamic__enabled=True, max_staleness=1), processes)
    used, waves, found = [], [], []
    for step in range(12):
        found = team.step(step)
        used += _order(found)
        waves.append(found[0].sums["waves"][0])
        assert total(found, "groups_missing") == 0
    assert used == [3 * i for i in range(12 * PROMPTS)]  # none is lost, none comes twice, on any number of processes
    assert waves[0] > 1
    assert np.mean(waves[5:]) < 2  # it has learned how many to draw
    assert found[0].sums["prompts_a_group"][0] == pytest.approx(3, abs=0.5)
    assert total(found, "drawn_all_one") > 0


def test_without_staleness_the_surplus_is_dropped(tmp_path: Path) -> None:
    team = Team(options(tmp_path, dynamic__enabled=True))
    used = [number for step in range(6) for number in team.numbers(step)]
    assert all(number % 3 == 0 for number in used)
    assert len(set(used)) == len(used) == 6 * PROMPTS
    assert team.save()[0][0]["held"] == []


@pytest.mark.parametrize("processes", [1, 2])
def test_a_shortfall(tmp_path: Path, processes: int, caplog: pytest.LogCaptureFixture) -> None:
    one = {"dynamic__enabled": True, "dynamic__max_waves": 1}
    padded = Team(options(tmp_path, **one, dynamic__shortfall="pad"), processes)
    found = padded.step(0)
    assert _order(found) == [0, 3]
    assert total(found, "groups_missing") == 2
    assert "2 of 4 groups whose rewards differ in 1 waves of 4 prompts" in caplog.text
    filled = Team(options(tmp_path, **one, dynamic__shortfall="fill"), processes)
    assert filled.numbers(0) == [0, 1, 2, 3]
    failing = Team(options(tmp_path, **one, dynamic__shortfall="fail"), processes)
    with pytest.raises(RunFailure, match=r"rollout\.dynamic\.max_waves"):
        failing.step(0)


def test_a_step_is_never_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "by_number", lambda samples: [0.0] * len(samples))
    team = Team(options(tmp_path, dynamic__enabled=True, dynamic__max_waves=2), 2)
    assert len(team.numbers(0)) == 1


SETTINGS: list[dict[str, Any]] = [
    {"tail": "carry", "extra_prompts": 3, "max_staleness": 2},
    {"tail": "ahead", "max_staleness": 2},
    {"dynamic__enabled": True, "max_staleness": 1},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize("processes", [1, 2])
def test_the_state_survives_a_checkpoint(tmp_path: Path, changes: dict[str, Any], processes: int) -> None:
    """On the same number of processes everything is as if it had never stopped; on another, no prompt is lost."""
    config = options(tmp_path, **changes)
    one = Team(config, processes)
    for step in range(4):
        one.step(step)
    saved = one.save()
    again, other = Team(config, processes), Team(config, 3 - processes)
    again.restore(saved)
    other.restore(saved)
    assert sorted(g["number"] for own in other.save()[0] for g in own["held"]) == sorted(
        g["number"] for own in saved[0] for g in own["held"]
    )
    seen: list[int] = []
    for step in range(4, 10):
        expected, found, elsewhere = one.step(step), again.step(step), other.step(step)
        assert _order(expected) == _order(found)
        for a, b in zip(expected, found, strict=True):
            for x, y in zip(a.groups, b.groups, strict=True):
                assert x.prompt == y.prompt
                for mine, theirs in zip(x.ended_results(), y.ended_results(), strict=True):
                    np.testing.assert_array_equal(mine.tokens, theirs.tokens)
                    np.testing.assert_array_equal(mine.sampled, theirs.sampled)
        seen += _order(elsewhere)
    assert len(seen) == len(set(seen)) == 6 * PROMPTS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tail": "abort"}, "tail = 'abort' needs extra_prompts"),
        ({"extra_prompts": 2}, "tail = 'wait' waits for every prompt"),
        ({"tail": "carry", "extra_prompts": 2}, "tail = 'carry' needs max_staleness of at least 1"),
        ({"tail": "carry", "max_staleness": 1}, "tail = 'carry' needs extra_prompts or budget"),
        ({"tail": "ahead"}, "tail = 'ahead' needs max_staleness"),
        ({"budget": 5}, "budget = 5: only tail = 'carry'"),
        ({"max_staleness": 1}, "tail = 'wait' keeps nothing from step to step"),
        ({"dynamic__enabled": True, "tail": "ahead", "max_staleness": 1}, "dynamic.enabled judges whole groups"),
        ({"dynamic__ratio_cap": 0.5}, "ratio_cap = 0.5: must be at least 1"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        options(tmp_path, **changes)


def test_stale_rows_need_a_loss_that_knows_of_them(tmp_path: Path) -> None:
    changes = {"rollout__tail": "ahead", "rollout__max_staleness": 1}
    with pytest.raises(ConfigError, match=r"config\.rollout\.max_staleness = 1: .* config\.hyper\.correction\.how"):
        tiny.plan(tiny.config(tmp_path, **changes))
    for more in ({"hyper__correction__how": "mask"}, {"hyper__old_logprobs": "sampled"}):
        tiny.plan(tiny.config(tmp_path, **changes, **more))
