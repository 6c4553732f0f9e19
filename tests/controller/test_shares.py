"""A sampler and a judge at work at the same time, and moved to other shares when one of them becomes slower."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from tests.compilations import BACKEND, compilations
from tests.rollout.test_engine import CAPACITY, Letters, model, prompt_of, prompts
from yatt_jax.controller.forecast import Load, forecast
from yatt_jax.controller.placement import Limits, Phase, Placement
from yatt_jax.controller.shares import Role, Shares
from yatt_jax.parallel.partition import Partition, Split, make_partitions
from yatt_jax.rollout.engine import Ask, Engine
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.types import Params, Rollout, Sample

TRAIN, ROLLOUT = make_partitions(Split(2, 4, 1), Split(), jax.devices())
SAMPLING, VERDICT = Sampling(max_new_tokens=CAPACITY), Sampling(max_new_tokens=6)
EVEN = Placement((("sample", 4), ("judge", 4)))


def engine(share: Partition) -> Engine:
    return Engine(model(), Letters(), share, rows=4, max_prompt_tokens=16 + CAPACITY, max_new_tokens=CAPACITY)


def weights(seed: int) -> Params:
    tree = model().init(seed, TRAIN)
    return {**tree, "unembedding": tree["unembedding"] * 6}


@pytest.fixture
def shares() -> Iterator[Shares]:
    role = Role(model(), engine)
    made = Shares(ROLLOUT, {"sample": role, "judge": role}, EVEN, Limits())
    yield made
    made.close()


@dataclasses.dataclass
class Outcome:
    rollout: Rollout
    verdicts: dict[int, list[int]]
    overlap: float


def phase(shares: Shares, actor: Params) -> Outcome:
    """A rollout phase: the judge writes on each response as it ends, on devices of its own."""
    sampler, judge = shares.engine("sample"), shares.engine("judge")
    laid_out, judging = shares.lay_out("sample", actor), shares.held("judge")
    coming: queue.Queue[Sample | None] = queue.Queue()
    verdicts: dict[int, list[int]] = {}
    spans: list[tuple[float, float]] = []

    def judge_all() -> None:
        while (sample := coming.get()) is not None:
            begin = time.monotonic()
            asked = [Ask(prompt_of([*sample.prompt.tokens, *sample.tokens]), sample.sample_id)]
            (verdict,) = judge.sample(judging, asked, VERDICT, seed=9)
            assert sample.sample_id not in verdicts
            verdicts[sample.sample_id] = verdict.tokens.tolist()
            spans.append((begin, time.monotonic()))

    judge.sample(judging, [], VERDICT, seed=9)  # compiles, so that the times of the phase are those of its work
    sampler.sample(laid_out, [], SAMPLING, seed=7)
    thread = threading.Thread(target=judge_all)
    thread.start()
    begin = time.monotonic()
    ids = [100 + i for i in range(len(prompts()))]
    rollout, samples = sampler.generate(
        laid_out, prompts(), SAMPLING, seed=7, sample_ids=ids, groups=ids, version=0, finished=coming.put
    )
    ended = time.monotonic()
    coming.put(None)
    thread.join()
    assert sorted(verdicts) == ids == sorted(sample.sample_id for sample in samples)
    overlap = sum(max(0.0, min(stop, ended) - max(start, begin)) for start, stop in spans)
    return Outcome(rollout, verdicts, overlap)


def measured(placement: Placement, judging: float) -> Phase:
    """What the controller would see where a judge takes so many times the sampler's work."""

    def load(work: float) -> Load:
        return Load(0, 0, 0, 64, 1, (max(1, round(10 * work)),) * 64, 0.1, 0.0, 0.0)

    loads = {"sample": load(1.0), "judge": load(judging)}
    seconds = forecast(placement.shares, loads)[1]
    busy = {role: 6.4 * work / placement[role] for role, work in (("sample", 1.0), ("judge", judging))}
    loads = {r: dataclasses.replace(x, busy=busy[r], waiting=max(0.0, seconds - busy[r])) for r, x in loads.items()}
    return Phase(placement, seconds, 0.0, loads)


@pytest.mark.slow
def test_a_judge_that_becomes_slower_gets_devices_and_nothing_else_changes(shares: Shares) -> None:
    actor, judge = weights(0), weights(5)
    shares.hold("judge", judge)
    first = phase(shares, actor)
    assert first.overlap > 0
    placements = [EVEN]
    for step in range(8):
        decision = shares.decide(measured(shares.placement, 1.0 if step < 3 else 3.0))
        for wanted in decision.compile:
            shares.compile_ahead(wanted).result()  # a later phase finds it done
        placements.append(shares.placement)
    assert placements[:4] == [EVEN] * 4
    assert shares.placement == Placement((("sample", 2), ("judge", 6)))
    moves = [decision for decision in shares.decisions if decision.reason.startswith("moves")]
    assert [move.placement for move in moves] == [shares.placement]
    share = shares.engine("judge").group.partition
    assert len(share.mesh.devices.flat) == 6
    for held, given in zip(jax.tree.leaves(shares.held("judge")), jax.tree.leaves(judge), strict=True):
        assert held.sharding.device_set == set(share.mesh.devices.flat)
        for shard in held.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(given)[shard.index])
    with compilations() as seen:
        laid_out = shares.lay_out("sample", actor)
    for mine, given in zip(jax.tree.leaves(laid_out), jax.tree.leaves(actor), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(given))
    with compilations() as seen:
        then = phase(shares, actor)
    assert BACKEND not in seen  # its programs were compiled while the split before was in use
    assert then.overlap > 0
    np.testing.assert_array_equal(then.rollout.inputs.tokens, first.rollout.inputs.tokens)
    np.testing.assert_array_equal(then.rollout.response_mask, first.rollout.response_mask)
    np.testing.assert_allclose(then.rollout.sampled_logprobs, first.rollout.sampled_logprobs, atol=1e-5)
    assert then.verdicts == first.verdicts


def test_programs_of_a_split_are_kept(shares: Shares) -> None:
    shares.hold("judge", weights(5))
    before = shares.engine("sample")
    other = Placement((("sample", 6), ("judge", 2)))
    assert shares.compiled == [EVEN]
    shares.lay_out("sample", weights(0))
    shares.compile_ahead(other).result()
    assert set(shares.compiled) == {EVEN, other}
    assert shares.compile_ahead(other) is shares.compile_ahead(other)
    assert shares.engine("sample") is before


def test_a_compilation_that_fails_is_heard_of(shares: Shares) -> None:
    shares.hold("judge", weights(5))  # and the sampler's weights were never laid out
    with pytest.raises(KeyError, match="sample"):
        shares.compile_ahead(Placement((("sample", 6), ("judge", 2)))).result()
    with pytest.raises(KeyError, match="sample"):
        shares.decide(measured(EVEN, 1.0))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Placement((("judge", 4), ("sample", 4))), r"placement of \['judge', 'sample'\], and the roles are"),
        (Placement((("sample", 8), ("judge", 1))), "more than the 8"),
    ],
)
def test_placements_that_do_not_fit(placement: Placement, message: str) -> None:
    role = Role(model(), engine)
    with pytest.raises(ValueError, match=message):
        Shares(ROLLOUT, {"sample": role, "judge": role}, placement, Limits())
