from __future__ import annotations

import re
import types
from typing import Any, get_args

import jax
import numpy as np
import pytest

from tests.compilations import compilations
from yatt_jax.parallel.exchange import (
    Layout,
    Plan,
    exchange,
    home_shards,
    layout_sharding,
    place_index,
    plan_exchange,
    program,
)
from yatt_jax.parallel.partition import Partition, Split, make_partitions
from yatt_jax.parallel.process_rows import (
    device_share,
    from_process_rows,
    own_values,
    plan_own,
    rows_each,
    to_process_rows,
)
from yatt_jax.parallel.route import factor, find_places, find_route, ranks

FILL = {"tokens": -7, "reward": np.nan, "kept": 0xFF, "ended": True, "absent": None}


def partition(data: int, tensor: int) -> Partition:
    return make_partitions(Split(data, 1, tensor), Split(-1, 1, tensor), jax.devices()[: data * tensor])[0]


def batch(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    return {
        "tokens": np.arange(rows * 3, dtype=np.int32).reshape(rows, 3) + 1,
        "reward": rng.normal(size=rows).astype(np.float32),
        "kept": rng.integers(0, 256, (rows, 3, 2), dtype=np.uint8),
        "ended": rng.random(rows) < 0.5,
        "absent": None,
    }


def place(tree: dict[str, Any], where: Partition, layout: Layout) -> dict[str, Any]:
    return jax.device_put(tree, layout_sharding(where, layout))


def plain(tree: dict[str, Any], source: np.ndarray, fill: dict[str, Any]) -> dict[str, Any]:
    """What an exchange does, by indexing."""

    def take(x: np.ndarray, value: Any) -> np.ndarray:
        filled = np.full((len(source), *x.shape[1:]), value, x.dtype)
        filled[source >= 0] = x[source[source >= 0]]
        return filled

    return jax.tree.map(take, tree, fill)


def equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for name in expected:
        if expected[name] is not None:
            assert got[name].dtype == expected[name].dtype
            np.testing.assert_array_equal(np.asarray(got[name]), expected[name])


def text_of(tree: dict[str, Any], plan: Plan) -> tuple[str, int]:
    """The compiled program, and the temporary bytes of a device."""
    leaves = tuple(jax.tree.leaves(tree))
    fills = tuple(np.zeros((), leaf.dtype) for leaf in leaves)
    compiled = program(plan.shapes).lower(leaves, fills, place_index(plan)).compile()  # pyright: ignore[reportFunctionMemberAccess]
    return compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("data", "tensor", "radix", "layout", "target"),
    [
        (8, 1, 8, "devices", "rows"),
        (8, 1, 2, "rows", "devices"),
        *((4, 2, 2, layout, target) for layout in get_args(Layout) for target in get_args(Layout)),
        (2, 4, 8, "devices", "rows"),
        (2, 4, 8, "rows", "rows"),
        (1, 8, 8, "devices", "rows"),
        (1, 8, 8, "rows", "devices"),
    ],
)
def test_rows_land_in_their_slots(data: int, tensor: int, radix: int, layout: Layout, target: Layout) -> None:
    where, rows = partition(data, tensor), 24
    tree = batch(rows)
    rng = np.random.default_rng(data)
    source = np.append(rng.permutation(rows), rng.integers(-1, rows, 24))[:40]  # some rows twice, some empty slots
    source[[0, 17, 39]] = -1
    plan = plan_exchange(source, rows, where, layout=layout, target=target, radix=radix)
    got = exchange(place(tree, where, layout), plan, FILL)
    equal(got, plain(tree, source, FILL))
    assert got["kept"].sharding.is_equivalent_to(layout_sharding(where, target), 3)


def test_zeros_fill_empty_slots_by_default() -> None:
    where = partition(8, 1)
    plan = plan_exchange(np.full(8, -1), 16, where)
    got = exchange(place(batch(16), where, "devices"), plan)
    assert not got["reward"].any()
    assert plan.moved == 0
    assert plan.shapes.buffer == 0


@pytest.mark.parametrize("tensor", [1, 2])
def test_rows_that_stay_need_no_exchange(tensor: int) -> None:
    where = partition(8 // tensor, tensor)
    tree = place(batch(16), where, "rows")
    # Rows change their order within each shard, and leave its last slot empty.
    turned = np.arange(16).reshape(8 // tensor, 2 * tensor)[:, ::-1]
    source = np.pad(turned, [(0, 0), (0, 1)], constant_values=-1).ravel()
    plan = plan_exchange(source, 16, where, layout="rows")
    equal(exchange(tree, plan, FILL), plain(batch(16), source, FILL))
    text, _ = text_of(tree, plan)
    assert plan.moved == 0
    assert not re.search(r"all-to-all|all-gather|collective-permute|all-reduce", text)


def test_rows_that_stay_on_a_device_are_only_gathered_in_their_tensor_group() -> None:
    where = partition(4, 2)
    tree = place(batch(16), where, "devices")
    plan = plan_exchange(np.arange(16)[::-1].reshape(4, 4)[::-1].ravel(), 16, where)
    text, _ = text_of(tree, plan)
    assert plan.moved == 0
    assert "all-to-all" not in text
    assert gathering_groups(text) == {2}


def gathering_groups(text: str) -> set[int]:
    """Sizes of the device groups of all all-gathers of a program."""
    lines = [line for line in text.splitlines() if re.search(r"= .* all-gather(-start)?\(", line)]
    sizes = set()
    for line in lines:
        listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
        tiled = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
        assert listed or tiled, line
        sizes.add(len(listed[1].split(",")) if listed else int(tiled[2]) if tiled else 0)
    return sizes


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_batch_is_never_gathered_and_memory_is_a_devices_share(tensor: int) -> None:
    where, rows, width = partition(8 // tensor, tensor), 64, 4096
    tree = {"kept": np.zeros((rows, width), np.uint8), "reward": np.zeros(rows, np.float32)}
    placed = jax.device_put(tree, layout_sharding(where, "devices"))
    swapped = np.arange(rows)
    swapped[[3, 60]], swapped[[10, 40]] = [60, 3], [40, 10]
    plan = plan_exchange(swapped, rows, where)
    text, temporary = text_of(placed, plan)
    assert plan.moved >= 4
    assert "all-to-all" in text
    assert "all-reduce" not in text
    assert gathering_groups(text) == ({2} if tensor == 2 else set())
    share = rows // 8 * tensor
    # What is sent, what is received, and what the group shares: all in the order of the device's own rows.
    assert plan.shapes.buffer <= 8 // tensor + tensor + share
    assert temporary <= (3 * plan.shapes.buffer + share) * width


def test_other_plans_of_the_same_shape_compile_nothing() -> None:
    where = partition(8, 1)
    tree = place(batch(16), where, "devices")

    def turned(by: int) -> np.ndarray:
        return (np.arange(16) + by) % 16

    first = exchange(tree, plan_exchange(turned(2), 16, where))
    with compilations() as seen:
        for by in (4, 6, 14):
            second = exchange(tree, plan_exchange(turned(by), 16, where))
        jax.block_until_ready(second)
    assert seen == []
    assert not np.array_equal(first["tokens"], second["tokens"])


def test_a_plan_like_an_earlier_one_keeps_its_program() -> None:
    where = partition(8, 1)
    large = plan_exchange((np.arange(64) + 8) % 64, 64, where)
    assert large.shapes.blocks == (8, 0)
    swapped = np.arange(64)
    swapped[[0, 63]] = [63, 0]
    small = plan_exchange(swapped, 64, where)
    assert small.shapes.blocks == (1, 0)
    kept = plan_exchange(swapped, 64, where, like=large)
    assert kept.shapes == large.shapes
    grown = plan_exchange((np.arange(64) + 8) % 64, 64, where, like=small)
    assert grown.shapes == large.shapes
    still = plan_exchange(np.arange(64), 64, where, like=large)
    assert still.shapes == large.shapes
    tree = place(batch(64), where, "devices")
    equal(exchange(tree, kept, FILL), plain(batch(64), swapped, FILL))
    equal(exchange(tree, still, FILL), batch(64))


def test_a_plan_like_an_earlier_one_with_tensor_groups() -> None:
    where = partition(4, 2)
    large = plan_exchange((np.arange(16) + 4) % 16, 16, where, layout="rows")
    swapped = np.arange(16)
    swapped[[0, 15]] = [15, 0]
    tree = place(batch(16), where, "rows")
    for source in (swapped, np.arange(16)):
        plan = plan_exchange(source, 16, where, layout="rows", like=large)
        assert plan.shapes == large.shapes
        equal(exchange(tree, plan, FILL), plain(batch(16), source, FILL))


@pytest.mark.parametrize("digits", [(64,), (8, 8), (4, 4, 4), (2,) * 6])
def test_stages_deliver_every_row(digits: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    devices, rows = 64, 5
    sender, row = np.divmod(rng.permutation(devices * rows), rows)
    receiver = rng.integers(0, devices, len(sender))
    route = find_route(sender, row, receiver, digits, (0,) * len(digits))
    held = np.arange(devices * rows).reshape(devices, rows)
    for stage, (digit, table) in enumerate(zip(digits, route.tables, strict=True)):
        stride = int(np.prod(digits[stage + 1 :], dtype=int))
        sent = np.take_along_axis(held, table, 1).reshape(devices, digit, -1)
        received = np.empty_like(sent)
        for device in range(devices):
            for other in range(digit):
                peer = device + (other - device // stride % digit) * stride
                received[device, other] = sent[peer, device // stride % digit]
        held = received.reshape(devices, -1)
    np.testing.assert_array_equal(held[receiver, route.position], sender * rows + row)


def test_a_plan_takes_stages_where_they_need_smaller_buffers() -> None:
    where = partition(8, 1)
    swapped = np.arange(16)
    swapped[[0, 15]] = [15, 0]
    tree = place(batch(16), where, "devices")
    staged = plan_exchange(swapped, 16, where, radix=2)
    assert (staged.shapes.digits, staged.shapes.blocks) == ((2, 2, 2, 1), (1, 1, 1, 0))
    direct = plan_exchange(swapped, 16, where, radix=8)
    assert (direct.shapes.digits, direct.shapes.blocks) == ((8, 1), (1, 0))
    assert staged.shapes.buffer < direct.shapes.buffer
    for plan in (staged, direct):
        assert plan.moved == 2
        equal(exchange(tree, plan, FILL), plain(batch(16), swapped, FILL))


def test_many_shards_of_few_rows_are_sent_in_stages_of_small_buffers() -> None:
    # Half of the 8 rows of each of 64 shards go anywhere: one exchange would hold a block for every other shard.
    rng = np.random.default_rng(1)
    source = np.arange(512)
    moving = rng.permutation(512)[:256]
    source[moving] = moving[rng.permutation(256)]
    places = find_places(source, 8, 8, 64, 1, (False, False))
    buffers = {}
    for digits in [(64,), (8, 8), (2,) * 6]:
        s = places.sent
        route = find_route(places.sender[s], places.row[s], places.device[s], digits, (0,) * len(digits))
        buffers[len(digits)] = sum(g * c for g, c in zip(digits, route.blocks, strict=True))
    assert buffers[1] >= 64
    assert buffers[2] <= buffers[1]
    assert buffers[6] < buffers[1]


def test_factors_and_ranks() -> None:
    assert factor(2048, 8) == (8, 8, 8, 4)
    assert factor(64, 2) == (2,) * 6
    assert factor(1, 8) == (1,)
    assert factor(26, 8) == (13, 2)
    assert ranks(np.array([3, 1, 3, 3, 1])).tolist() == [0, 0, 1, 2, 1]


def test_homes_of_rows() -> None:
    where = partition(4, 2)
    assert home_shards(16, where).tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert home_shards(8, where, "rows").tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("rows", [0, 3, 16])
@pytest.mark.parametrize("tensor", [1, 2])
def test_rows_of_a_process_go_and_come_back(rows: int, tensor: int) -> None:
    where = partition(8 // tensor, tensor)
    each = rows_each(rows, where)
    assert each == -(-rows // 8) * 8
    own = batch(rows)
    spread = from_process_rows(own, each, where)
    assert len(spread["tokens"]) == each
    back = to_process_rows(spread, where)
    for name in ("tokens", "reward", "kept", "ended"):
        np.testing.assert_array_equal(back[name][:rows], own[name])
        assert not back[name][rows:].any()
    source = np.full(24, -1)
    source[np.random.default_rng(0).permutation(24)[:rows]] = np.arange(rows)
    moved = exchange(spread, plan_exchange(source, each, where), FILL)
    equal(moved, plain(own, source, FILL))
    if not rows:
        return  # results come back to rows
    returned = own_values({"reward": moved["reward"]}, plan_own(source, each, where), where, {"reward": np.nan})
    np.testing.assert_array_equal(returned["reward"], np.append(own["reward"], np.full(each - rows, np.nan)))


@pytest.mark.parametrize("owners", [[0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 1]])
def test_devices_of_a_process_must_lie_side_by_side(owners: list[int]) -> None:
    with pytest.raises(ValueError, match=r"belong to processes .*side by side"):
        device_share(mesh_of(owners))


def test_processes_may_come_in_any_order() -> None:
    assert device_share(mesh_of([1, 1, 0, 0])) == 2


def mesh_of(owners: list[int]) -> Any:
    devices = np.array([types.SimpleNamespace(process_index=owner) for owner in owners])
    return types.SimpleNamespace(devices=devices)


def test_what_does_not_fit_is_named() -> None:
    where = partition(4, 2)
    with pytest.raises(ValueError, match="12 rows do not divide over 8 devices; fill up to 16"):
        plan_exchange(np.zeros(8, int), 12, where)
    with pytest.raises(ValueError, match="6 slots do not divide over 4 data shards; fill up to 8"):
        plan_exchange(np.zeros(6, int), 8, where)
    with pytest.raises(ValueError, match=r"a row 0 \.\.\. 7 or -1"):
        plan_exchange(np.full(8, 8), 8, where)
    plan = plan_exchange(np.arange(16), 16, where)
    with pytest.raises(ValueError, match=r"exchanges 16 rows .* float32\[8\]"):
        exchange(place({"reward": np.zeros(8, np.float32)}, where, "devices"), plan)
    with pytest.raises(ValueError, match="place it with from_process_rows"):
        exchange(place({"reward": np.zeros(16, np.float32)}, where, "rows"), plan)
    with pytest.raises(ValueError, match="9 rows of this process, and room for 8"):
        from_process_rows(np.zeros(9), 8, where)
    with pytest.raises(ValueError, match="9 rows do not divide over the 8 devices of a process"):
        from_process_rows(np.zeros(9), 9, where)
    with pytest.raises(ValueError, match="not split over all devices"):
        to_process_rows(place({"reward": np.zeros(16, np.float32)}, where, "rows"), where)
