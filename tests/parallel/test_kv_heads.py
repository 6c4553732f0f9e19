"""Fewer key-value heads than devices on the tensor axis: each head lies where its queries are, and learns the same."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.models.build import build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.parallel.partition import Partition, Split, axis_faults, make_partitions
from yatt_jax.parallel.repartition import repartition
from yatt_jax.types import Inputs

MODEL = build("lm", DecoderConfig(vocab=32, hidden=16, layers=2, heads=8, kv_heads=2, head_dim=4, mlp=32))
TOKENS = np.random.default_rng(1).integers(0, 32, (8, 6))


def heads_of(partition: Partition, axes: str, count: int) -> dict[Any, tuple[int, int]]:
    where = partition.sharding((axes, None), (count, 4)).devices_indices_map((count, 4))
    return {device: index[0].indices(count)[:2] for device, index in where.items()}


@pytest.mark.parametrize("tensor", [4, 8])
@pytest.mark.parametrize("other", [2, 4, 8])
def test_each_device_holds_the_one_head_of_its_queries(tensor: int, other: int) -> None:
    for partition in make_partitions(Split(-1, 1, tensor), Split(-1, 1, other), jax.devices(), kv_heads=(2,)):
        queries, keys = heads_of(partition, "heads", 8), heads_of(partition, "kv_heads", 2)
        assert heads_of(partition, "act_kv_heads", 2) == keys
        for device in jax.devices():
            (low, high), (first, last) = queries[device], keys[device]
            assert high - low == 8 // partition.split.tensor
            assert (first, last) == (low // 4, low // 4 + 1)
            assert (high - 1) // 4 == first


def test_without_the_number_of_heads_they_are_replicated_whole() -> None:
    train, _ = make_partitions(Split(-1, 1, 4), Split(-1, 1, 4), jax.devices())
    assert set(heads_of(train, "kv_heads", 2).values()) == {(0, 2)}


def test_heads_that_fit_no_factor_of_the_mesh_are_left_alone() -> None:
    # Three of four shards cannot hold six heads; two can.
    train, _ = make_partitions(Split(-1, 1, 4), Split(-1, 1, 8), jax.devices(), kv_heads=(6, 5))
    assert dict(train.mesh.shape) == {"m4_8": 2, "m2_4": 2, "m1_2": 2}
    assert train.sharding(("kv_heads",), (6,)).shard_shape((6,)) == (3,)
    assert train.sharding(("kv_heads",), (5,)).shard_shape((5,)) == (5,)


def gradient(partition: Partition) -> dict[str, Any]:
    inputs = Inputs(TOKENS, np.broadcast_to(np.arange(6), TOKENS.shape), np.ones_like(TOKENS))  # pyright: ignore[reportArgumentType]

    def loss(params: Any) -> jax.Array:
        module = MODEL.bind(params)
        return jnp.sum(jnp.square(jax.nn.log_softmax(module.logits(module(inputs)[0])))) / 1e3

    with partition.active():
        return jax.jit(jax.grad(loss))(MODEL.init(0, partition))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return jax.device_get(gradient(make_partitions(Split(), Split(), jax.devices()[:1])[0]))


@pytest.mark.parametrize("tensor", [4, 8])
@pytest.mark.parametrize("known", [True, False])
def test_replicated_heads_move_both_ways_and_have_the_gradient_of_one_device(
    tensor: int, known: bool, alone: dict[str, Any]
) -> None:
    kv_heads = (2,) if known else ()
    for split, other in ((Split(1, 8 // tensor, tensor), Split(4, 1, 2)), (Split(1, 4, 2), Split(-1, 1, tensor))):
        train, rollout = make_partitions(split, other, jax.devices(), kv_heads=kv_heads)
        params = MODEL.init(0, train)
        moved = repartition(params, MODEL.axes, rollout)
        back = repartition(moved, MODEL.axes, train)
        want = MODEL.init(0, make_partitions(Split(), Split(), jax.devices()[:1])[0])
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(moved), jax.device_get(want))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), jax.device_get(want))
    train, _ = make_partitions(Split(1, 8 // tensor, tensor), Split(4, 1, 2), jax.devices(), kv_heads=kv_heads)
    found = gradient(train)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), jax.device_get(found), alone)
    # A head that several devices hold has one gradient on all of them.
    kernel = found["decoder"]["layers"]["attention"]["k"]["kernel"]
    assert float(jnp.max(jnp.abs(kernel))) > 1e-3
    copies: dict[str, np.ndarray] = {}
    for shard in kernel.addressable_shards:
        data = np.asarray(shard.data)
        np.testing.assert_array_equal(copies.setdefault(str(shard.index), data), data)


@pytest.mark.parametrize(
    ("split", "sizes", "words"),
    [
        (
            Split(-1, 1, 8),
            {"heads": 4},
            [r"train.tensor = 8 .* the actor's heads = 4; one of \[1, 2, 4\]"],
        ),
        (Split(-1, 1, 4), {"mlp": 6}, [r"train.tensor = 4 does not divide the actor's mlp = 6; one of \[1, 2\]"]),
        (Split(-1, 1, 8), {"kv_heads": 12, "heads": 24}, [r"kv_heads = 12: one must divide .* one of \[1, 2, 4\]"]),
        (
            Split(1, 8, 1),
            {"hidden": 20},
            [r"train.fsdp = 8 .* the actor's hidden = 20; one of \[1, 2, 4\]"],
        ),
        (Split(1, 4, 2), {"hidden": 18, "mlp": 9}, ["mlp = 9", r"hidden = 18; one of \[1, 2\]"]),
        (Split(1, 1, 8), {"kv_heads": 2}, []),
    ],
)
def test_axes_that_do_not_divide_list_what_would(split: Split, sizes: dict[str, int], words: list[str]) -> None:
    train, _ = make_partitions(split, Split(), jax.devices())
    model = {"heads": 8, "kv_heads": 8, "mlp": 64, "hidden": 64} | sizes
    faults = axis_faults(train, **model, whose="the actor's")
    assert len(faults) == len(words)
    for fault, word in zip(faults, words, strict=True):
        assert re.search(word, fault), fault
