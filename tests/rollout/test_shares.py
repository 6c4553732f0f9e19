"""Two models that sample at the same time, each on its share of the devices."""

from __future__ import annotations

import threading
import time

import jax
import numpy as np
import pytest

from tests.compilations import BACKEND, compilations
from tests.rollout.test_engine import CAPACITY, Letters, model, prompts
from yatt_jax.controller.forecast import forecast, measured_load
from yatt_jax.parallel.partition import Partition, Split, make_partitions
from yatt_jax.parallel.shares import make_shares, to_share
from yatt_jax.rollout.engine import Engine
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.types import Params, Rollout, Sample

SAMPLING = Sampling(max_new_tokens=CAPACITY)
VERDICT = Sampling(max_new_tokens=6)


def partitions(tensor: int = 1) -> tuple[Partition, Partition]:
    return make_partitions(Split(2, 4, 1), Split(tensor=tensor), jax.devices())


def weights(seed: int) -> Params:
    tree = model().init(seed, partitions()[0])
    return {**tree, "unembedding": tree["unembedding"] * 6}


def engine(share: Partition) -> Engine:
    return Engine(model(), Letters(), share, rows=4, max_prompt_tokens=16 + CAPACITY, max_new_tokens=CAPACITY)


def sample(using: Engine, params: Params, **options: object) -> tuple[Rollout, list[Sample]]:
    count = len(prompts())
    ids, groups = list(range(100, 100 + count)), list(range(count))
    return using.generate(params, prompts(), SAMPLING, seed=7, sample_ids=ids, groups=groups, version=0, **options)  # type: ignore[arg-type]


def test_chunks_are_timed() -> None:
    _, rollout = partitions()
    (share,) = make_shares(rollout, (2,))
    using, params = engine(share), to_share(weights(0), model().axes, rollout, share)
    sample(using, params)
    begin = time.perf_counter()
    _, samples = sample(using, params)
    seconds = time.perf_counter() - begin
    paces = using.stats.paces
    assert sum(chunk.steps for chunk in paces) == using.stats.steps
    assert sum(chunk.admitted for chunk in paces) == len(samples)
    assert paces[0].rows == 2  # four slots on two devices
    assert paces[0].waiting == len(samples) - 4
    assert 0.5 * seconds < sum(chunk.seconds for chunk in paces) <= seconds
    load = measured_load(paces, [len(s.tokens) for s in samples], seconds=seconds, devices=2, slots=2)
    # The forecast of what was measured is near what was measured.
    assert forecast([("sample", 2)], {"sample": load})[0] == pytest.approx(load.busy, rel=0.5)


@pytest.mark.slow
def test_samples_do_not_depend_on_the_share() -> None:
    _, rollout = partitions()
    params = weights(0)
    whole, one, five = (make_shares(rollout, (count,))[0] for count in (8, 1, 5))
    found = [sample(engine(s), to_share(params, model().axes, rollout, s))[0] for s in (whole, one, five)]
    for other in found[1:]:
        np.testing.assert_array_equal(other.inputs.tokens, found[0].inputs.tokens)
        np.testing.assert_allclose(other.sampled_logprobs, found[0].sampled_logprobs, atol=1e-5)


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_compiled_ahead_is_not_compiled_again(tensor: int) -> None:
    train, rollout = partitions(tensor)
    share = make_shares(rollout, (4,))[0]
    params = to_share(model().init(3, train), model().axes, rollout, share)
    using = engine(share)
    failed: list[BaseException] = []

    def ahead() -> None:
        try:
            using.compile_ahead(params)
        except BaseException as error:
            failed.append(error)

    with compilations() as seen:
        thread = threading.Thread(target=ahead)
        thread.start()
        thread.join()
    assert not failed
    assert BACKEND in seen
    with compilations() as seen:
        sample(using, params)
    assert BACKEND not in seen
    expected = sample(engine(share), params)[0]
    np.testing.assert_array_equal(sample(using, params)[0].inputs.tokens, expected.inputs.tokens)
