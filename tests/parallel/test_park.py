from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.compilations import BACKEND, compilations
from yatt_jax.controller.update import init_state
from yatt_jax.errors import InputError
from yatt_jax.parallel import park as parking
from yatt_jax.parallel.park import HOST, fetch, is_parked, park
from yatt_jax.parallel.partition import Partition, Split, make_partitions, shardings
from yatt_jax.parallel.repartition import release, repartition
from yatt_jax.types import PyTree, TrainState

AXES = {"matrix": ("embed", "mlp"), "few": ("embed", "kv_heads"), "norm": (None,)}
SHAPES = {"matrix": (16, 32), "few": (16, 2), "norm": (16,)}
TX = optax.adamw(1e-2)


def state_of(partition: Partition) -> TrainState:
    generator = np.random.default_rng(0)
    numbers = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return init_state(jax.device_put(numbers, shardings(numbers, AXES, partition)), TX, partition)


def step(state: TrainState) -> TrainState:
    loss = lambda p: jnp.sum(p["matrix"].T @ p["few"] * 0.1) + jnp.sum(jnp.sin(p["norm"]))  # noqa: E731
    updates, opt = TX.update(jax.grad(loss)(state.params), state.opt, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt, state.skipped, state.skipped_in_row)


def kinds(tree: PyTree) -> set[str | None]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


PARTITIONS = [
    pytest.param(Split(), 1, id="one device"),
    *(
        pytest.param(split, 8, id=str(split))
        for split in (Split(8, 1, 1), Split(1, 8, 1), Split(1, 4, 2), Split(2, 2, 2), Split(1, 1, 8))
    ),
]


@pytest.mark.parametrize(("split", "devices"), PARTITIONS)
def test_a_round_trip_keeps_every_bit_and_place(split: Split, devices: int) -> None:
    partition, _ = make_partitions(split, Split(), jax.devices()[:devices])
    state = state_of(partition)
    before, where = jax.device_get(state), jax.tree.map(lambda x: x.sharding, state)
    own = jax.devices()[0].default_memory().kind
    parked = park(state)
    assert kinds(parked) == {HOST}
    assert all(is_parked(leaf) for leaf in jax.tree.leaves(parked))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(parked), before)
    fetched = fetch(parked)
    assert kinds(fetched) == {own}
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(parked))
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(str(s)), fetched, where)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(fetched), before)


@pytest.mark.parametrize("split", [Split(2, 2, 2), Split(1, 8, 1)])
def test_updates_with_parking_between_are_the_same_and_compile_once(split: Split) -> None:
    partition, _ = make_partitions(split, Split(), jax.devices())
    traced = 0

    def counted(state: TrainState) -> TrainState:
        nonlocal traced
        traced += 1
        return step(state)

    plain, parked = state_of(partition), state_of(partition)
    donating, again = jax.jit(step, donate_argnums=0), jax.jit(counted, donate_argnums=0)
    for _ in range(2):
        plain = donating(plain)
    counts = []
    with compilations() as seen:
        for _ in range(3):
            parked = again(fetch(park(parked)))
            counts.append(seen.count(BACKEND))
    plain = donating(plain)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(parked), jax.device_get(plain))
    assert traced == 1
    assert counts == [1, 1, 1]


def test_a_part_of_a_state_is_parked_alone() -> None:
    partition, _ = make_partitions(Split(2, 2, 2), Split(), jax.devices())
    state = state_of(partition)
    opt = park(state.opt)
    assert kinds(opt) == {HOST}
    assert HOST not in kinds(state.params)
    whole = step(TrainState(state.step, state.params, fetch(opt), state.skipped, state.skipped_in_row))
    expected = step(state_of(partition))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, expected)


def test_what_sampling_shares_stays_on_the_devices() -> None:
    train, rollout = make_partitions(Split(1, 4, 2), Split(4, 1, 2), jax.devices())
    state = state_of(train)
    laid_out = repartition(state.params, AXES, rollout)
    assert laid_out["norm"] is state.params["norm"]
    parked = park(state, shared=laid_out)
    assert parked.params["norm"] is laid_out["norm"]
    assert kinds([parked.params["matrix"], parked.opt]) == {HOST}
    np.testing.assert_array_equal(np.asarray(laid_out["norm"]), np.asarray(state_of(train).params["norm"]))
    state = fetch(parked)
    release(laid_out, state.params)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_parking_twice_and_fetching_twice_change_nothing() -> None:
    partition, _ = make_partitions(Split(2, 2, 2), Split(), jax.devices())
    parked = park(state_of(partition))
    assert jax.tree.leaves(park(parked))[0] is jax.tree.leaves(parked)[0]
    fetched = fetch(parked)
    assert jax.tree.leaves(fetch(fetched))[0] is jax.tree.leaves(fetched)[0]


def test_frozen_weights_travel_to_the_host_once() -> None:
    partition, _ = make_partitions(Split(2, 2, 2), Split(), jax.devices())
    frozen = state_of(partition).params
    before = jax.device_get(frozen)
    parked = park(frozen)
    for _ in range(2):
        fetched = fetch(parked, keep=True)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(fetched), before)
        release(fetched, parked)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(fetched))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(parked), before)


def test_devices_without_host_memory_are_named(monkeypatch: pytest.MonkeyPatch, one_device: Partition) -> None:
    state = state_of(one_device)
    monkeypatch.setattr(parking, "_kinds", lambda device: ["device"])
    with pytest.raises(InputError, match=r"parking: .* has no pinned_host memory \(it has device\)"):
        park(state)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
