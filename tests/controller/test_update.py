from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from yatt_jax.controller.optimizer import OptimizerConfig, make_optimizer
from yatt_jax.controller.update import init_state, split_micro, state_shardings, update
from yatt_jax.models.build import Model, build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.ops.aggregate import Aggregation, aggregate
from yatt_jax.ops.logprobs import logprobs_from_hidden
from yatt_jax.parallel.partition import Partition, Split, make_partitions
from yatt_jax.types import Inputs, Max, Metrics, Params, Ratio, TrainState

SGD = OptimizerConfig(name="sgd", lr=1.0, schedule="constant", b1=0.0, clip_norm=0.0)
TOKEN_MEAN = Aggregation()
LENGTHS = np.array([4, 1, 0, 3, 2, 0, 4])


def linear_batch() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(7, 4, 3)).astype(np.float32)
    y = rng.normal(size=(7, 4)).astype(np.float32)
    mask = (np.arange(4) < LENGTHS[:, None]).astype(np.float32)
    return {"x": jnp.asarray(x), "y": jnp.asarray(y), "mask": jnp.asarray(mask)}


def linear(params: Params, rows: dict[str, jax.Array]) -> jax.Array:
    return rows["x"] @ params["w"] + params["bias"]


def squares(outputs: jax.Array, rows: dict[str, jax.Array], how: Aggregation) -> tuple[Ratio, Metrics]:
    error = jnp.square(outputs - rows["y"])
    top = Max(jnp.max(jnp.where(rows["mask"] > 0, error, -jnp.inf)))
    return aggregate(error, rows["mask"], how), {"error": aggregate(error, rows["mask"], how), "worst": top}


def fresh(one_device: Partition, config: OptimizerConfig = SGD, dtype: str = "float32"):
    params = {"w": jnp.array([0.5, -1.0, 2.0], dtype), "bias": jnp.array(0.1, dtype)}
    params = jax.tree.map(lambda x: jax.device_put(x, one_device.replicated), params)
    tx, _ = make_optimizer(config, 100)
    return init_state(params, tx, one_device), tx


def step(state: TrainState, batch: Any, tx: Any, micro: int, how: Aggregation = TOKEN_MEAN, forward=linear):
    loss = functools.partial(squares, how=how)
    return jax.jit(lambda s, b: update(s, b, forward=forward, loss=loss, tx=tx, micro=micro))(state, batch)


@pytest.mark.parametrize(
    ("how", "splits"),
    [
        (Aggregation(), (1, 2, 3, 7, 9)),
        (Aggregation("sequence_mean"), (1, 3)),
        (Aggregation("sequence_sum"), (3,)),
        (Aggregation("fixed_length", 4), (3,)),
    ],
    ids=lambda value: getattr(value, "how", ""),
)
def test_every_split_gives_the_gradient_of_the_whole(one_device, how, splits):
    batch = linear_batch()
    state, tx = fresh(one_device)
    x, y, mask = (np.asarray(batch[k], np.float64) for k in ("x", "y", "mask"))
    weight = {
        "token_mean": np.full(7, 1 / mask.sum()),
        "sequence_mean": 1 / np.maximum(mask.sum(1), 1) / 5,
        "sequence_sum": np.full(7, 1 / 5),
        "fixed_length": np.full(7, 1 / 20),
    }[how.how]
    residual = 2 * (x @ np.array([0.5, -1.0, 2.0]) + 0.1 - y) * mask * weight[:, None]
    error = np.square(residual / 2 / np.where(mask > 0, weight[:, None], 1)) * mask
    gradient = {"w": np.einsum("bt,btd->d", residual, x), "bias": residual.sum()}
    for micro in splits:
        new, metrics = step(state, batch, tx, micro, how)
        for name, expected in gradient.items():
            got = np.asarray(state.params[name]) - np.asarray(new.params[name])
            np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)
        assert isinstance(metrics["error"], Ratio)
        assert isinstance(metrics["worst"], Max)
        assert float(metrics["error"].mean()) == pytest.approx(float((error * weight[:, None]).sum()), rel=1e-6)
        assert float(metrics["worst"].value) == pytest.approx(float(error.max()), rel=1e-6)
        norm = np.sqrt(np.square(gradient["w"]).sum() + gradient["bias"] ** 2)
        assert float(metrics["grad_norm"].mean()) == pytest.approx(norm, rel=1e-6)
        assert new.step == 1


def same(a: Any, b: Any) -> bool:
    return all(bool(jnp.all(x == y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("micro", [1, 3])
def test_a_step_on_numbers_that_are_not_finite_is_skipped_and_counted(one_device, micro):
    batch = linear_batch()
    bad_loss = batch | {"y": batch["y"].at[0, 0].set(jnp.nan)}
    bad_gradient = batch | {"x": batch["x"].at[3, 0, 0].set(jnp.inf), "mask": batch["mask"].at[3, 0].set(1e-38)}
    state, tx = fresh(one_device, OptimizerConfig(lr=0.1))
    state, _ = step(state, batch, tx, micro)
    first, metrics = step(state, bad_loss, tx, micro)
    second, _ = step(first, bad_gradient, tx, micro)
    assert same((second.params, second.opt, second.step), (state.params, state.opt, state.step))
    assert (int(second.skipped), int(second.skipped_in_row)) == (2, 2)
    assert float(metrics["skipped"].mean()) == 1.0
    for name in ("loss", "error", "grad_norm"):
        assert (float(metrics[name].total), float(metrics[name].weight)) == (0.0, 0.0)
    assert float(metrics["worst"].value) == -np.inf
    third, metrics = step(second, batch, tx, micro)
    assert (int(third.step), int(third.skipped), int(third.skipped_in_row)) == (2, 2, 0)
    assert float(metrics["skipped"].mean()) == 0.0
    assert not same(third.params, state.params)


def test_a_gradient_that_alone_is_not_finite_is_skipped(one_device):
    def forward(params, rows):
        return linear(params, rows) + jnp.sqrt(jnp.abs(params["w"][0] - 0.5))  # finite, with an infinite slope

    state, tx = fresh(one_device)
    new, metrics = step(state, linear_batch(), tx, 1, forward=forward)
    assert same(new.params, state.params)
    assert (int(new.step), int(new.skipped)) == (0, 1)
    assert float(metrics["skipped"].mean()) == 1.0


@pytest.mark.parametrize("micro", [1, 2])
def test_a_batch_without_weight_changes_nothing(one_device, micro):
    batch = linear_batch()
    state, tx = fresh(one_device, OptimizerConfig(lr=0.1, schedule="constant"))
    state, _ = step(state, batch, tx, micro)  # momentum would move the parameters even without a gradient
    new, metrics = step(state, batch | {"mask": jnp.zeros((7, 4))}, tx, micro)
    assert same(new, state)
    assert float(metrics["skipped"].mean()) == 0.0
    assert float(metrics["grad_norm"].weight) == 0.0


def test_gradients_of_bfloat16_parameters_add_up_in_float32(one_device):
    rows = 512
    batch = {"x": jnp.ones((rows, 1, 3)), "y": jnp.zeros((rows, 1)), "mask": jnp.ones((rows, 1))}
    state, tx = fresh(one_device, dtype="bfloat16")
    # Each micro-batch adds 3.2 to a sum that ends at 1638: in bfloat16 it would stop growing at 512.
    new, metrics = step(state, batch, tx, 512)
    gradient = 2 * (0.5 - 1.0 + 2.0 + 0.1)
    assert float(metrics["grad_norm"].mean()) == pytest.approx(2 * gradient, rel=1e-2)
    assert new.params["w"].dtype == jnp.bfloat16


def test_split_takes_every_nth_row():
    rows = {"a": jnp.arange(7), "b": jnp.arange(14.0).reshape(7, 2)}
    split = split_micro(rows, 3)
    np.testing.assert_array_equal(split["a"], [[0, 3, 6], [1, 4, 0], [2, 5, 0]])
    assert split["b"].shape == (3, 3, 2)


def test_a_split_moves_no_row_between_devices():
    partition = make_partitions(Split(), Split())[0]
    rows = jax.ShapeDtypeStruct((32, 5), "float32", sharding=partition.rows)

    def split(x):
        with partition.active():
            return split_micro(x, 4)

    compiled = jax.jit(split).lower(rows).compile()
    assert not re.search(r"all-gather|all-to-all|collective-permute|all-reduce", compiled.as_text() or "")
    assert compiled.output_shardings.spec == jax.sharding.PartitionSpec(None, "m1_8")


# The real language model on every mesh.

CONFIG = DecoderConfig(vocab=32, hidden=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp=32, qkv_bias=True)
MESHES = {"one": None, "data8": Split(8, 1, 1), "fsdp8": Split(1, 8, 1), "tensor2_fsdp4": Split(1, 4, 2)}


@functools.cache
def partition_of(name: str) -> Partition:
    split = MESHES[name]
    return make_partitions(split or Split(), Split(), jax.devices() if split else jax.devices()[:1])[0]


@functools.cache
def model() -> Model:
    return build("lm", CONFIG)


def token_batch() -> tuple[Inputs, np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 9, 16)
    segments = (np.arange(8) < lengths[:, None]).astype(np.int32)
    positions = np.where(segments, np.arange(8), 0).astype(np.int32)
    mask = segments * (np.arange(8) >= 3)
    tokens, positions, segments = map(jnp.asarray, (rng.integers(0, 32, (16, 8)), positions, segments))
    return Inputs(tokens, positions, segments), mask.astype(np.float32)


@functools.cache
def trained(mesh: str, micro: int, config: OptimizerConfig) -> tuple[TrainState, TrainState, list[dict[str, Any]]]:
    """Two steps of likelihood training; the shardings before, the state after, the metrics."""
    partition = partition_of(mesh)
    start = jax.device_get(model().init(0, partition_of("one")))
    params = jax.tree.map(jax.device_put, start, model().shardings(partition))
    tx, _ = make_optimizer(config, 10)
    state = init_state(params, tx, partition)
    shardings = jax.tree.map(lambda x: x.sharding, state)

    def forward(params, rows):
        module = model().bind(params)
        return logprobs_from_hidden(
            module(rows[0])[0],
            module.output_matrix(),
            rows[0].tokens,
            temperature=1.0,
            mask=rows[1],
            capacity=5,
            chunk=8,
            row_shards=partition.row_shards,
        )

    def loss(outputs, rows):
        return aggregate(-outputs.logprobs - 0.1 * outputs.entropy, rows[1], Aggregation()), {}

    def run(state, batch):
        with partition.active():
            return update(state, batch, forward=forward, loss=loss, tx=tx, micro=micro)

    program, batch = jax.jit(run, donate_argnums=0), jax.device_put(token_batch(), partition.rows)
    metrics: list[Any] = []
    for _ in range(2):
        state, found = program(state, batch)
        metrics.append(jax.device_get(found))
    return shardings, state, metrics


ADAM = OptimizerConfig(lr=1e-2, schedule="constant", weight_decay=0.1)


@pytest.mark.parametrize(
    "mesh", ["tensor2_fsdp4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("data8", "fsdp8"))]
)
def test_every_mesh_takes_the_same_steps(mesh):
    _, reference, reference_metrics = trained("one", 1, ADAM)
    shardings, state, metrics = trained(mesh, 2, ADAM)
    assert state.step == 2
    # Adam divides by the gradient's size, so that rounding in tiny gradients weighs as much as anywhere.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *jax.device_get((state.params, reference.params))
    )
    for got, expected in zip(metrics, reference_metrics, strict=True):
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(got[name].mean(), expected[name].mean(), rtol=1e-5)
    # Nothing moves to another place from step to step.
    unmoved = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, shardings)
    assert all(jax.tree.leaves(unmoved))


def test_optimizer_state_lies_as_its_parameters():
    partition = partition_of("tensor2_fsdp4")
    tx, _ = make_optimizer(ADAM, 10)
    params = model().shardings(partition)
    where = state_shardings(model().abstract, params, tx, partition)
    adam = next(part for part in where.opt if isinstance(part, optax.ScaleByAdamState))
    assert jax.tree.leaves(adam.mu) == jax.tree.leaves(params)
    assert jax.tree.leaves(adam.nu) == jax.tree.leaves(params)
    assert adam.count == partition.replicated
    assert len({str(s) for s in jax.tree.leaves(params)}) > 1  # the test sees real splits
