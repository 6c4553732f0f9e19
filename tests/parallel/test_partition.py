from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from yatt_jax.parallel.partition import Split, make_partitions, shardings
from yatt_jax.parallel.repartition import bytes_per_device, repartition

SPLITS = [Split(8, 1, 1), Split(1, 8, 1), Split(1, 4, 2), Split(2, 2, 2), Split(1, 1, 8), Split(4, 1, 2)]
ROLLOUTS = [Split(8, 1, 1), Split(4, 1, 2), Split(2, 1, 4), Split(1, 1, 8)]


@pytest.mark.parametrize(("train", "rollout"), list(itertools.product(SPLITS, ROLLOUTS)))
def test_one_mesh_holds_both_splits(train: Split, rollout: Split) -> None:
    one, two = make_partitions(train, rollout, jax.devices())
    assert one.mesh is two.mesh
    assert list(one.mesh.devices.flat) == jax.devices()
    assert one.row_shards == train.data * train.fsdp
    assert two.row_shards == rollout.data
    assert math.prod(one.mesh.shape[a] for a in one.rules["heads"]) == train.tensor
    assert math.prod(two.mesh.shape[a] for a in two.rules["heads"]) == rollout.tensor
    assert math.prod(one.mesh.shape[a] for a in one.rules["embed"]) == train.fsdp
    assert two.rules["embed"] == ()


def test_tensor_shards_keep_their_place_when_only_fsdp_is_dropped() -> None:
    train, rollout = make_partitions(Split(1, 4, 2), Split(4, 1, 2), jax.devices())
    axes, shape = ("embed", "mlp"), (16, 32)
    assert train.spec(axes, shape) == P(("m2_8",), ("m1_2",))
    assert rollout.spec(axes, shape) == P(None, ("m1_2",))


def test_minus_one_is_inferred() -> None:
    train, rollout = make_partitions(Split(-1, 2, 2), Split(-1, 1, 4), jax.devices())
    assert train.split == Split(2, 2, 2)
    assert rollout.split == Split(2, 1, 4)


@pytest.mark.parametrize(
    ("train", "rollout", "words"),
    [
        (Split(-1, -1, 1), Split(), "parallel.train: only one axis can be -1"),
        (Split(-1, 3, 1), Split(), r"parallel.train: .* does not divide 8 devices.*\[1, 2, 4, 8\]"),
        (Split(2, 2, 1), Split(), "parallel.train: .* = 4 devices, and there are 8"),
        (Split(0, 2, 1), Split(), "parallel.train.data = 0"),
        (Split(), Split(4, 2, 1), "parallel.rollout has no fsdp axis"),
    ],
)
def test_sizes_that_do_not_fit_are_named(train: Split, rollout: Split, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_partitions(train, rollout, jax.devices())


def test_splits_without_a_common_refinement_list_what_works() -> None:
    with pytest.raises(ValueError, match=r"no common refinement.*rollout.tensor among \[1, 3, 6\] works"):
        make_partitions(Split(2, 1, 3), Split(3, 1, 2), jax.devices()[:6])


def test_few_key_value_heads_follow_their_query_heads() -> None:
    train, rollout = make_partitions(Split(1, 1, 8), Split(2, 1, 4), jax.devices())
    # Eight query heads in blocks of one, two key-value heads: each must lie where its four query heads are.
    queries = train.sharding(("heads", None), (8, 4)).devices_indices_map((8, 4))
    keys = train.sharding(("kv_heads", None), (2, 4)).devices_indices_map((2, 4))
    for device in jax.devices():
        query, key = queries[device][0], keys[device][0]
        assert query.stop - query.start == 1
        low, high, _ = key.indices(2)
        assert low <= query.start // 4 < high
    # One head cannot be split at all: every device holds it.
    assert rollout.sharding(("kv_heads", None), (1, 4)).shard_shape((1, 4)) == (1, 4)


@pytest.mark.parametrize(("train", "rollout"), [(Split(1, 4, 2), Split(4, 1, 2)), (Split(2, 2, 2), Split(1, 1, 8))])
def test_repartition_keeps_bits_and_shares_what_lies_right(train: Split, rollout: Split) -> None:
    one, two = make_partitions(train, rollout, jax.devices())
    tree = {"matrix": jnp.arange(16 * 32.0).reshape(16, 32), "norm": jnp.arange(16.0)}
    axes = {"matrix": ("embed", "mlp"), "norm": (None,)}
    placed = jax.device_put(tree, shardings(tree, axes, one))
    moved = repartition(placed, axes, two)
    assert moved["matrix"].sharding.is_equivalent_to(two.sharding(axes["matrix"], (16, 32)), 2)
    assert moved["norm"] is placed["norm"]
    for name, original in tree.items():
        np.testing.assert_array_equal(moved[name], original)
    back = repartition(moved, axes, one)
    np.testing.assert_array_equal(back["matrix"], tree["matrix"])


def test_bytes_per_device_counts_shards() -> None:
    one, _ = make_partitions(Split(1, 4, 2), Split(), jax.devices())
    tree = {"matrix": jax.ShapeDtypeStruct((16, 32), jnp.float32), "norm": jax.ShapeDtypeStruct((16,), jnp.bfloat16)}
    axes = {"matrix": ("embed", "mlp"), "norm": (None,)}
    assert bytes_per_device(tree, shardings(tree, axes, one)) == 16 * 32 * 4 // 8 + 16 * 2
