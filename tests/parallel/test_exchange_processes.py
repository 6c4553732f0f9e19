"""Rows exchanged among two and four processes land as they do in one."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest

from tests.parallel.exchange_job import run, samples
from tests.processes import run_processes

PROGRAM = """
import json
import jax
from tests.processes import connect
connect()
from tests.parallel.exchange_job import run
print(json.dumps(run({counts}, {splits}, jax.devices())))
"""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run([13], [(4, 1), (2, 2), (1, 4)], jax.devices()[:4])


@pytest.mark.parametrize(
    ("devices_each", "counts", "splits"),
    [
        (2, [5, 8], [(4, 1), (2, 2)]),
        pytest.param(1, [5, 0, 7, 1], [(2, 2), (1, 4)], marks=pytest.mark.slow),
    ],
)
def test_processes_exchange_as_one_does(
    alone: dict[str, Any], devices_each: int, counts: list[int], splits: list[tuple[int, int]]
) -> None:
    program = PROGRAM.format(counts=counts, splits=splits)
    done = run_processes(program, len(counts), devices_each, timeout=100)
    found = [json.loads(one.stdout.splitlines()[-1]) for one in done]
    for data, tensor in splits:
        split = f"{data}x{tensor}"
        whole = alone[split]["shards"]
        assert {len(held) for held in whole.values()} == {data}
        seen: set[str] = set()
        for one in found:
            for name, held in one[split]["shards"].items():
                assert set(held) <= set(whole[name])
                for first, values in held.items():
                    assert json.dumps(values) == json.dumps(whole[name][first])
                seen |= set(held)
        assert seen == set(whole["tokens"])
        returned = np.concatenate([one[split]["returned"] for one in found]).astype(np.float32)
        np.testing.assert_array_equal(returned, samples()["reward"])
