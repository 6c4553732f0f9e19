"""Shares of a process's devices: weights reach them bit for bit, from any training layout, and from each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.parallel.partition import Partition, Split, make_partitions, shardings
from yatt_jax.parallel.shares import between_shares, make_shares, to_share
from yatt_jax.types import PyTree

AXES = {"matrix": ("embed", "mlp"), "few": ("embed", "kv_heads"), "table": ("vocab", "embed"), "norm": (None,)}
SHAPES = {"matrix": (16, 32), "few": (16, 2), "table": (48, 16), "norm": (16,)}
# Layout for training, tensor axis for sampling, shares.
SPLITS = [
    (Split(8, 1, 1), 1, (5, 3)),
    (Split(1, 8, 1), 1, (1, 7)),
    (Split(2, 2, 2), 2, (6, 2)),
    (Split(1, 4, 2), 1, (2, 4)),
    (Split(1, 1, 8), 2, (2, 2, 4)),
    (Split(2, 2, 2), 4, (4, 4)),
]


def numbers() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def trained(partition: Partition) -> PyTree:
    return jax.device_put(numbers(), shardings(numbers(), AXES, partition))


@pytest.mark.parametrize(("train", "tensor", "counts"), SPLITS)
def test_weights_reach_every_share_bit_for_bit(train: Split, tensor: int, counts: tuple[int, ...]) -> None:
    partition, rollout = make_partitions(train, Split(tensor=tensor), jax.devices(), kv_heads=(2,))
    params = trained(partition)
    shares = make_shares(rollout, counts)
    used = [device for share in shares for device in share.mesh.devices.flat]
    assert used == jax.devices()[: sum(counts)]
    for share, count in zip(shares, counts, strict=True):
        assert (share.split.tensor, share.split.data) == (tensor, count // tensor)
        with jax.transfer_guard("disallow"):
            laid_out = to_share(params, AXES, rollout, share)
        for name, expected in numbers().items():
            leaf = laid_out[name]
            assert leaf.sharding == share.sharding(AXES[name], leaf.shape)
            assert len(leaf.addressable_shards) == count
            for shard in leaf.addressable_shards:  # what each device holds, not what one of them says for all
                np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
        # Programs of a share run on it alone.
        total = jax.jit(lambda tree: sum(jnp.sum(x) for x in tree.values()))(laid_out)
        assert total.sharding.device_set == set(share.mesh.devices.flat)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), numbers())


def test_what_lies_right_is_not_copied() -> None:
    partition, rollout = make_partitions(Split(8, 1, 1), Split(), jax.devices())
    params = trained(partition)
    (share,) = make_shares(rollout, (3,))
    laid_out = to_share(params, AXES, rollout, share)
    where = {s.device: s.data.unsafe_buffer_pointer() for s in params["matrix"].addressable_shards}
    for shard in laid_out["matrix"].addressable_shards:
        assert shard.data.unsafe_buffer_pointer() == where[shard.device]
    del laid_out
    np.testing.assert_array_equal(np.asarray(params["matrix"]), numbers()["matrix"])


@pytest.mark.parametrize(("tensor", "before", "after"), [(1, (5, 3), (2, 6)), (2, (2, 6), (6, 2)), (4, (4, 4), (4, 4))])
def test_weights_move_between_shares(tensor: int, before: tuple[int, int], after: tuple[int, int]) -> None:
    partition, rollout = make_partitions(Split(1, 8, 1), Split(tensor=tensor), jax.devices(), kv_heads=(2,))
    old, new = make_shares(rollout, before)[1], make_shares(rollout, after)[1]
    if before != after:
        assert old != new
    held = to_share(trained(partition), AXES, rollout, old)
    with jax.transfer_guard("disallow"):
        moved = between_shares(held, AXES, new)
    for name, expected in numbers().items():
        assert moved[name].sharding == new.sharding(AXES[name], expected.shape)
        for shard in moved[name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
    kept = {s.device: s.data.unsafe_buffer_pointer() for s in held["matrix"].addressable_shards}
    for shard in moved["matrix"].addressable_shards:
        if shard.device in kept:
            assert shard.data.unsafe_buffer_pointer() == kept[shard.device]


@pytest.mark.parametrize(
    ("tensor", "counts", "message"),
    [
        (2, (3, 5), "a share of 3 devices: with parallel.rollout.tensor = 2 it must be a multiple of 2"),
        (1, (0, 8), "a share of 0 devices"),
        (1, (6, 3), r"shares of \[6, 3\] devices are more than the 8 of a process"),
    ],
)
def test_shares_that_do_not_fit(tensor: int, counts: tuple[int, ...], message: str) -> None:
    _, rollout = make_partitions(Split(), Split(tensor=tensor), jax.devices())
    with pytest.raises(ValueError, match=message):
        make_shares(rollout, counts)
