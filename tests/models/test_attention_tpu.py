"""Programs for TPUs that are not there: which kernels they hold, and that none of them holds the logits of a row."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from yatt_jax.models.build import build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.parallel.partition import Partition, Split, make_partitions
from yatt_jax.parallel.topology import described_devices
from yatt_jax.rollout.device import Programs
from yatt_jax.rollout.sampling import Sampling
from yatt_jax.rollout.session import row_controls
from yatt_jax.types import Inputs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"),
]

TOKENS = 8192
CONFIG = DecoderConfig(
    vocab=512,
    hidden=256,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=128,
    mlp=512,
    windows=(1024, 1024, 1024, 0),
    attention_softcap=50.0,
    dtype="bfloat16",
    remat="full",
)
TOPOLOGIES = ["v5e:2x2", "v5p:2x2x1"]
SPLITS = [(Split(1, 2, 2), Split(2, 1, 2)), (Split(4, 1, 1), Split(1, 1, 4))]


def kernels(text: str) -> list[str]:
    """Names of the TPU kernels that a compiled program calls."""
    return re.findall(r'%([\w-]+?)[.\d]* = .*custom_call_target="tpu_custom_call"', text)


def abstract(partition: Partition, tree: Any, *axes: str | None) -> Any:
    def one(x: Any) -> jax.ShapeDtypeStruct:
        names = (*axes, *(None,) * x.ndim)[: x.ndim]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=partition.sharding(names, x.shape))

    return jax.tree.map(one, tree)


def parameters(model: Any, partition: Partition) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        model.abstract,
        model.shardings(partition),
    )


def compiled_gradient(config: DecoderConfig, partition: Partition) -> Any:
    model = build("lm", config)
    rows = jax.eval_shape(lambda: jnp.zeros((4, TOKENS), jnp.int32))
    inputs = abstract(partition, Inputs(rows, rows, rows), "rows")

    def loss(params: Any, inputs: Inputs) -> jax.Array:
        with partition.active():
            return jnp.mean(model.bind(params)(inputs)[0].astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss)).lower(parameters(model, partition), inputs).compile()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("train", [train for train, _ in SPLITS[:1]])
def test_a_gradient_of_8k_tokens(topology: str, train: Split) -> None:
    partition, _ = make_partitions(train, Split(), described_devices(topology), kv_heads=(CONFIG.kv_heads,))
    found = compiled_gradient(CONFIG, partition)
    names = kernels(found.as_text())
    # Forward, forward again for the backward pass, and two kernels there, for each of the two windows.
    assert len(names) == 8, names
    assert all("splash" in name for name in names), names
    assert f"{TOKENS},{TOKENS}" not in found.as_text()
    rows = 4 // partition.row_shards
    logits = rows * CONFIG.heads // partition.split.tensor * TOKENS**2 * 2
    assert found.memory_analysis().temp_size_in_bytes < logits / 4


def test_the_same_without_kernels_holds_the_logits() -> None:
    partition, _ = make_partitions(SPLITS[0][0], Split(), described_devices(TOPOLOGIES[0]))
    found = compiled_gradient(
        dataclasses.replace(CONFIG, attention="plain", layers=1, windows=(), rope_of_layer=()), partition
    )
    assert kernels(found.as_text()) == []
    assert f"{TOKENS},{TOKENS}" in found.as_text()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("rollout", [rollout for _, rollout in SPLITS])
def test_the_engine_reads_its_cache_in_place(topology: str, rollout: Split) -> None:
    _, partition = make_partitions(Split(), rollout, described_devices(topology), kv_heads=(CONFIG.kv_heads,))
    model, rows = build("lm", CONFIG, "bfloat16"), 16
    programs = Programs(
        model,
        partition,
        rows=rows,
        capacity=8000,
        chunk=16,
        record_kept=False,
        cache_dtype=None,
        unroll=False,
    )
    assert programs.capacity == 8064
    params = parameters(model, partition)
    caches, state = jax.eval_shape(programs.start)
    caches = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=partition.sharding((None, "rows", "act_kv_heads", None, None), x.shape),
        ),
        caches,
    )
    controls = row_controls(Sampling(max_new_tokens=64), rows, CONFIG.vocab)
    flags, scalar = (jax.ShapeDtypeStruct(s, d) for s, d in (((rows,), bool), ((), jnp.int32)))
    state, controls, flags = (abstract(partition, x, "rows") for x in (state, controls, flags))
    decode: Any = programs.decode.lower(params, None, caches, state, controls, flags, scalar, scalar).compile()
    lanes = partition.row_shards
    piece, of_lane = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((lanes, 512), (lanes,)))
    piece, of_lane = abstract(partition, piece, "rows"), abstract(partition, of_lane, "rows")
    extend: Any = programs.extend.lower(params, None, caches, piece, of_lane, of_lane).compile()
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches)) // partition.mesh.size
    for program in (decode, extend):
        assert kernels(program.as_text()) == ["attention_cache"]
    # Neither the cache nor a layer of it is copied; a piece takes the cache of its slot out and puts it back.
    assert decode.memory_analysis().alias_size_in_bytes >= cache
    assert decode.memory_analysis().temp_size_in_bytes < cache / CONFIG.layers / 4
    assert extend.memory_analysis().temp_size_in_bytes < cache / (rows // lanes) * 3
