from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compilations import BACKEND, compilations
from yatt_jax.parallel.partition import Partition, Split, make_partitions, shardings
from yatt_jax.parallel.repartition import SecondLayout, compare, measured, release, repartition, traffic_of
from yatt_jax.types import PyTree

SPLITS = [Split(8, 1, 1), Split(1, 8, 1), Split(1, 4, 2), Split(2, 2, 2), Split(1, 1, 8), Split(4, 1, 2)]
ROLLOUTS = [Split(8, 1, 1), Split(4, 1, 2), Split(2, 1, 4), Split(1, 1, 8)]
AXES = {
    "embedding": ("vocab", "embed"),
    "q": (None, "embed", "heads", None),
    "k": (None, "embed", "kv_heads", None),
    "o": (None, "heads", None, "embed"),
    "norm": (None,),
}
SHAPES = {"embedding": (24, 16), "q": (2, 16, 8, 4), "k": (2, 16, 2, 4), "o": (2, 8, 4, 16), "norm": (16,)}


@pytest.fixture
def compiled() -> Iterator[Callable[[], int]]:
    """Number of programs compiled since the test began."""
    with compilations() as seen:
        yield lambda: seen.count(BACKEND)


def values() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def placed(tree: PyTree, axes: PyTree, partition: Partition) -> PyTree:
    return jax.device_put(tree, shardings(tree, axes, partition))


MOVED = [
    (Split(8, 1, 1), Split(4, 1, 2)),
    (Split(1, 8, 1), Split(8, 1, 1)),
    (Split(1, 8, 1), Split(2, 1, 4)),
    (Split(1, 4, 2), Split(4, 1, 2)),
    (Split(1, 4, 2), Split(1, 1, 8)),
    (Split(2, 2, 2), Split(8, 1, 1)),
    (Split(2, 2, 2), Split(2, 1, 4)),
    (Split(1, 1, 8), Split(2, 1, 4)),
]


@pytest.mark.parametrize(("train", "rollout"), MOVED)
def test_every_move_and_its_way_back_keep_bits(train: Split, rollout: Split) -> None:
    one, two = make_partitions(train, rollout, jax.devices(), kv_heads=(2,))
    numbers = values()
    params = placed(numbers, AXES, one)
    laid_out, moved = measured(params, AXES, two)
    for name, want in numbers.items():
        assert laid_out[name].sharding.is_equivalent_to(two.sharding(AXES[name], want.shape), want.ndim)
        np.testing.assert_array_equal(laid_out[name], want)
    assert moved.leaves + moved.shared == len(AXES)
    assert moved.shared >= 1  # the norm at least
    assert moved.seconds is None
    back = repartition(laid_out, AXES, one)
    for name, want in numbers.items():
        assert back[name].sharding.is_equivalent_to(params[name].sharding, want.ndim)
        np.testing.assert_array_equal(back[name], want)


def test_bytes_are_counted_by_device() -> None:
    one, two = make_partitions(Split(1, 4, 2), Split(4, 1, 2), jax.devices())
    tree = {"matrix": jnp.ones((16, 32)), "norm": jnp.ones(16)}
    axes = {"matrix": ("embed", "mlp"), "norm": (None,)}
    params = placed(tree, axes, one)
    laid_out, there = measured(params, axes, two, wait=True)
    # Each of eight devices holds [4, 16] of the matrix, and then [16, 16]: a quarter of that was there.
    assert (there.leaves, there.shared) == (1, 1)
    assert there.received == 8 * (256 - 64) * 4
    assert there.copied == 8 * 64 * 4
    assert there.seconds is not None
    assert there.seconds > 0
    if not there.measured:  # [4, 16] and the norm, [16, 16], and that once more
        assert there.peak == (64 + 16 + 256 + 256) * 4
    back = compare(laid_out, repartition(laid_out, axes, one))
    assert (back.received, back.copied) == (0, 8 * 64 * 4)
    nothing = compare(params, params)
    assert (nothing.leaves, nothing.shared, nothing.received, nothing.copied) == (0, 2, 0, 0)


@pytest.mark.parametrize(("train", "rollout"), list(itertools.product(SPLITS, ROLLOUTS)))
def test_counted_bytes_are_those_of_the_elements_themselves(train: Split, rollout: Split) -> None:
    one, two = make_partitions(train, rollout, jax.devices())
    for name, shape in SHAPES.items():
        source, target = one.sharding(AXES[name], shape), two.sharding(AXES[name], shape)
        number = np.arange(np.prod(shape)).reshape(shape)
        before, after = source.devices_indices_map(shape), target.devices_indices_map(shape)
        had = {d: set(number[before[d]].flat) for d in before}
        need = {d: set(number[after[d]].flat) for d in after}
        received = sum(len(need[d] - had[d]) for d in need)
        copied = sum(len(need[d] & had[d]) for d in need)
        assert traffic_of(shape, 4, source, target) == (received * 4, copied * 4)


@pytest.mark.parametrize(("train", "rollout"), list(itertools.product(SPLITS, ROLLOUTS)))
def test_tensor_blocks_nest_on_their_devices(train: Split, rollout: Split) -> None:
    """Whichever partition splits over tensor more often: each of its blocks lies in the other's on the same device."""
    one, two = make_partitions(train, rollout, jax.devices())
    fine, coarse = (one, two) if train.tensor >= rollout.tensor else (two, one)
    inner, outer = (p.sharding((None, "mlp"), (1, 64)).devices_indices_map((1, 64)) for p in (fine, coarse))
    for device in jax.devices():
        (low, high, _), (first, last, _) = (m[device][1].indices(64) for m in (inner, outer))
        assert first <= low < high <= last


def test_steps_after_the_first_compile_nothing(compiled: Callable[[], int]) -> None:
    one, two = make_partitions(Split(2, 2, 2), Split(2, 1, 4), jax.devices())
    tree = {"a": jnp.ones((48, 80)), "b": jnp.ones((48, 80)), "norm": jnp.ones(16)}
    axes = {"a": ("embed", "mlp"), "b": ("embed", "mlp"), "norm": (None,)}
    params = placed(tree, axes, one)
    step = jax.jit(lambda p: jax.tree.map(lambda x: x * 0.5, p), donate_argnums=0)
    counts = [compiled()]
    for _ in range(4):
        laid_out, _ = measured(params, axes, two)
        release(laid_out, params)
        params = step(params)
        counts.append(compiled())
    # One move (a and b share it) and the step.
    assert np.diff(counts).tolist() == [2, 0, 0, 0]


def test_release_frees_what_is_not_shared_and_only_once() -> None:
    one, two = make_partitions(Split(1, 4, 2), Split(4, 1, 2), jax.devices())
    numbers = values()
    params = placed(numbers, AXES, one)
    laid_out = repartition(params, AXES, two)
    used = jax.jit(lambda p: p["q"].sum())(laid_out)
    release(laid_out, params)
    assert {name for name, leaf in laid_out.items() if not leaf.is_deleted()} == {"norm"}
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    np.testing.assert_allclose(used, numbers["q"].sum(), rtol=1e-5)
    release(laid_out, params)
    # The other way round: the training layout is dropped while sampling, and rebuilt of the one for sampling.
    laid_out = repartition(params, AXES, two)
    release(params, laid_out)
    assert {name for name, leaf in params.items() if not leaf.is_deleted()} == {"norm"}
    for name, leaf in repartition(laid_out, AXES, one).items():
        np.testing.assert_array_equal(leaf, numbers[name])


def test_a_layout_that_is_all_shared_is_not_freed() -> None:
    one, two = make_partitions(Split(4, 1, 2), Split(4, 1, 2), jax.devices())
    params = placed(values(), AXES, one)
    layout = SecondLayout(AXES, two, keep=False)
    assert layout.of(params)["q"] is params["q"]
    layout.done()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("keep", [True, False])
def test_a_second_layout_is_kept_or_dropped(keep: bool) -> None:
    one, two = make_partitions(Split(1, 4, 2), Split(4, 1, 2), jax.devices())
    params = placed(values(), AXES, one)
    step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    layout = SecondLayout(AXES, two, keep=keep)
    assert layout.moved is None
    first = layout.of(params)
    assert layout.of(params) is first
    layout.done()
    assert first["q"].is_deleted() is not keep
    assert (layout.of(params) is first) is keep
    held = layout.of(params)
    params = step(params)  # donates what both layouts share
    second = layout.of(params)
    assert held["q"].is_deleted()
    assert second["norm"] is params["norm"]
    for name, want in values().items():
        np.testing.assert_array_equal(second[name], want + 1)
    layout.free()
    assert second["q"].is_deleted()
    assert not params["norm"].is_deleted()
