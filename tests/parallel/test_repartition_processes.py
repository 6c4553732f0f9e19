"""Moving, measuring and parking arrays of which each process holds a part only."""

from __future__ import annotations

import json

import pytest

from tests.processes import run_processes


def job() -> None:
    import json

    import jax
    import numpy as np

    from tests.processes import connect
    from yatt_jax.parallel.park import fetch, is_parked, park
    from yatt_jax.parallel.partition import Split, make_partitions, shardings
    from yatt_jax.parallel.repartition import measured, release, repartition

    connect()
    axes = {"matrix": ("embed", "mlp"), "few": ("embed", "kv_heads"), "norm": (None,)}
    shapes = {"matrix": (16, 32), "few": (16, 2), "norm": (16,)}
    whole = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()}
    tensor = min(4, jax.device_count())
    one, two = make_partitions(Split(1, -1, 2), Split(-1, 1, tensor), kv_heads=(2,))
    where = shardings(whole, axes, one)
    params = {n: jax.make_array_from_callback(x.shape, where[n], x.__getitem__) for n, x in whole.items()}
    places = {name: leaf.sharding for name, leaf in params.items()}

    def check(tree: dict[str, jax.Array]) -> None:
        for name, leaf in tree.items():
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), whole[name][shard.index])

    laid_out, moved = measured(params, axes, two, wait=True)
    check(laid_out)
    parked = park(params, shared=laid_out)
    assert all(is_parked(leaf) for name, leaf in parked.items() if leaf is not laid_out[name])
    check(parked)
    params = fetch(parked)
    check(params)
    release(laid_out, params)
    check(params)
    again = repartition(repartition(params, axes, two), axes, one)
    check(again)
    assert all(again[name].sharding.is_equivalent_to(places[name], again[name].ndim) for name in again)
    print(json.dumps({"received": moved.received, "copied": moved.copied, "shared": moved.shared}))


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (2, 4)])
def test_global_arrays_move_and_park_in_every_process(processes: int, devices: int) -> None:
    done = run_processes(job, processes, devices, timeout=120)
    found = [json.loads(line) for one in done for line in one.stdout.splitlines() if line.startswith("{")]
    assert found[0] == found[1]
    count = processes * devices
    # Train: fsdp over the rest, tensor 2. Rollout: the matrix in four column blocks, the few heads in two, on each.
    held = 16 // (count // 2)
    matrix = (16 * 8, held * 8)  # bytes / 4 that a device needs, and of those that it had
    few = (16, held)
    assert found[0]["received"] == devices * 4 * (matrix[0] - matrix[1] + few[0] - few[1])
    assert found[0]["copied"] == devices * 4 * (matrix[1] + few[1])
    assert found[0]["shared"] == 1
