"""What every process of test_exchange_processes.py runs: its own rows out to the data shards and back."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

from yatt_jax.parallel.balance import balance
from yatt_jax.parallel.exchange import exchange, home_shards, plan_exchange
from yatt_jax.parallel.partition import Split, make_partitions
from yatt_jax.parallel.process_rows import (
    first_rows,
    from_process_rows,
    own_values,
    plan_own,
    rows_each,
    to_process_rows,
)

SAMPLES = 13
FILL = {"tokens": -1, "reward": float("nan"), "kept": 0xFF, "ended": True}


def samples() -> dict[str, np.ndarray]:
    """All samples of the job; a process takes only its own of them."""
    rng = np.random.default_rng(4)
    return {
        "tokens": rng.integers(0, 1000, (SAMPLES, 3), dtype=np.int32),
        "reward": rng.normal(size=SAMPLES).astype(np.float32),
        "kept": rng.integers(0, 256, (SAMPLES, 3, 2), dtype=np.uint8),
        "ended": rng.random(SAMPLES) < 0.5,
    }


def run(counts: list[int], splits: list[tuple[int, int]], devices: list[Any]) -> dict[str, Any]:
    """One exchange for each split.

    Args:
      counts: samples of each process: the first ones of process 0, and so on.
      splits: data and tensor sizes.
      devices: all devices of the job.

    Returns:
      For each split what each shard holds that this process can address, {first slot: values} by leaf, as held by
      every device of it, and this process's rewards and rows after their way back.
    """
    process = jax.process_index()
    begin = sum(counts[:process])
    own = {name: x[begin : begin + counts[process]] for name, x in samples().items()}
    found: dict[str, Any] = {}
    for data, tensor in splits:
        partition = make_partitions(Split(data, 1, tensor), Split(-1, 1, tensor), devices)[0]
        each = rows_each(max(counts), partition)
        rows = np.concatenate([first_rows(each, partition)[p] + np.arange(n) for p, n in enumerate(counts)])
        # The assignment of the samples, not of their rows, so that it is the same for every number of processes.
        assigned = balance(np.arange(1.0, 1 + SAMPLES), data, 16 // data)
        source = assigned.source(rows)
        spread = from_process_rows(own, each, partition)
        moved = exchange(spread, plan_exchange(source, each * len(counts), partition), FILL)
        assert home_shards(each * len(counts), partition).max() == data - 1
        back = own_values(
            {"reward": moved["reward"]}, plan_own(source, each, partition), partition, {"reward": float("nan")}
        )
        shards: dict[str, dict[str, Any]] = {}
        for name, leaf in moved.items():
            for shard in leaf.addressable_shards:
                first = shard.index[0].indices(leaf.shape[0])[0]
                values = np.asarray(shard.data).tolist()
                held = shards.setdefault(name, {}).setdefault(str(first), values)
                assert json.dumps(held) == json.dumps(values)
        read = to_process_rows(spread, partition)
        assert all(np.array_equal(read[name][: counts[process]], own[name]) for name in own)
        returned = back["reward"][: counts[process]].tolist()
        assert len(back["reward"]) == each
        assert np.all(np.isnan(back["reward"][counts[process] :]))
        found[f"{data}x{tensor}"] = {"shards": shards, "returned": returned}
    return found
