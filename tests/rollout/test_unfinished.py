"""Sampling that stops before the end, and responses that are gone on with."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.compilations import compilations
from tests.rollout.test_engine import CAPACITY, engine, params, prompts
from yatt_jax.rollout.assemble import Result
from yatt_jax.rollout.engine import Ask, Engine
from yatt_jax.rollout.sampling import Sampling

PLAIN = Sampling(max_new_tokens=CAPACITY)
STOPS = Sampling(max_new_tokens=CAPACITY, stop=("DA", "K"), stop_token_ids=(1, 2))
FILTERED = Sampling(max_new_tokens=CAPACITY, temperature=0.8, top_p=0.8)


def resuming() -> Engine:
    return engine(4, chunk=3, pack=8, resumes=True)


def asked(begun: list[Result] | None = None) -> list[Ask]:
    return [Ask(p, 100 + i, None if begun is None else begun[i]) for i, p in enumerate(prompts())]


def nothing(tokens: int) -> Result:
    return Result(np.zeros(tokens, np.int32), np.zeros(tokens), np.zeros(tokens), None, "unfinished", "A" * tokens)


def equal(a: Result, b: Result) -> None:
    assert (a.finish, a.completion, a.tokens.tolist()) == (b.finish, b.completion, b.tokens.tolist())
    np.testing.assert_allclose(a.sampled, b.sampled, atol=1e-5)
    np.testing.assert_allclose(a.plain, b.plain, atol=1e-5)
    if len(a.tokens):
        assert a.kept is not None
        assert b.kept is not None
        assert len(a.kept) == len(b.kept) == len(a.tokens)


@pytest.mark.parametrize("sampling", [PLAIN, STOPS, FILTERED])
@pytest.mark.parametrize("budget", [2, 6])
def test_what_is_gone_on_with_is_what_was_never_stopped(sampling: Sampling, budget: int) -> None:
    """Whenever it is stopped: with prompts that are longer than a pack, in slots that others have left."""
    using = resuming()
    whole = using.sample(params(), asked(), sampling, seed=7)
    assert {r.finish for r in whole} <= {"length", "stop", "stop_string"}
    results = [nothing(0)] * len(whole)
    calls = 0
    while any(r.finish == "unfinished" for r in results):
        left = [i for i, r in enumerate(results) if r.finish == "unfinished"]
        again = using.sample(
            params(), [asked(results)[i] for i in left], sampling, seed=7, enough=lambda n: n >= budget
        )
        assert using.stats.steps <= budget + 2  # the chunk that it was in
        assert using.stats.unfinished == sum(r.finish == "unfinished" for r in again)
        for i, result in zip(left, again, strict=True):
            assert result.tokens[: len(results[i].tokens)].tolist() == results[i].tokens.tolist()
            results[i] = result
        calls += 1
    assert calls >= CAPACITY // (budget + 2)
    for a, b in zip(results, whole, strict=True):
        equal(a, b)


def test_enough_stops_between_chunks_and_keeps_what_was_written() -> None:
    ended: list[int] = []
    found = resuming().sample(
        params(), asked(), STOPS, seed=7, finished=lambda i, _: ended.append(i), enough=lambda _: len(ended) >= 3
    )
    done = [i for i, r in enumerate(found) if r.finish != "unfinished"]
    assert sorted(ended) == done
    assert 3 <= len(done) < len(found)
    assert any(len(r.tokens) for i, r in enumerate(found) if i not in done)
    whole = resuming().sample(params(), asked(), STOPS, seed=7)
    for some, every in zip(found, whole, strict=True):
        assert every.tokens[: len(some.tokens)].tolist() == some.tokens.tolist()


def test_each_response_has_a_limit_of_its_own() -> None:
    limits = [1 + i % CAPACITY for i in range(len(prompts()))]
    using = resuming()
    whole = using.sample(params(), asked(), PLAIN, seed=7)
    cut = [Ask(ask.prompt, ask.sample_id, limit=limit) for ask, limit in zip(asked(), limits, strict=True)]
    with compilations() as compiled:
        found = using.sample(params(), cut, PLAIN, seed=7)
    assert compiled == []
    assert [len(r.tokens) for r in found] == limits
    assert {r.finish for r in found} == {"length"}
    for short, long in zip(found, whole, strict=True):
        assert long.tokens[: len(short.tokens)].tolist() == short.tokens.tolist()


def test_faults() -> None:
    begun, ended = nothing(3), dataclasses.replace(nothing(3), finish="stop")
    prompt = prompts()[0]
    with pytest.raises(ValueError, match="sample 5 is begun: the engine needs resumes = True"):
        engine(4).sample(params(), [Ask(prompt, 5, begun)], PLAIN, seed=7)
    with pytest.raises(ValueError, match=r"sample 5 has ended \(stop\)"):
        resuming().sample(params(), [Ask(prompt, 5, ended)], PLAIN, seed=7)
    with pytest.raises(ValueError, match="sample 5: limit = 3 must be above the 3 tokens it has, and at most"):
        resuming().sample(params(), [Ask(prompt, 5, begun, limit=3)], PLAIN, seed=7)
    with pytest.raises(ValueError, match=f"sample 6: limit = 13 must .* at most sampling.max_new_tokens = {CAPACITY}"):
        resuming().sample(params(), [Ask(prompt, 6, limit=13)], PLAIN, seed=7)
