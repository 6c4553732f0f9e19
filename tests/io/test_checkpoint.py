"""Saving and restoring: every bit comes back, on any sharding, and nothing but whole steps is ever seen."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from yatt_jax.io import checkpoint_arrays, checkpoint_files, checkpoint_read
from yatt_jax.io.checkpoint import Checkpoints
from yatt_jax.io.checkpoint_config import CheckpointConfig
from yatt_jax.io.checkpoint_files import CheckpointFailure, SavedRunError
from yatt_jax.io.fingerprint import fingerprint
from yatt_jax.types import TrainState

KEEP_ALL = CheckpointConfig(keep=100)


def sharding(devices: int, *axes: str | None) -> NamedSharding:
    """Over a mesh of x = the devices, or of x = 2 and y = the rest where y is named."""
    chosen = np.array(jax.devices()[:devices])
    mesh = Mesh(chosen.reshape(2, -1), ("x", "y")) if "y" in axes else Mesh(chosen, ("x",))
    return NamedSharding(mesh, PartitionSpec(*axes))


def state(devices: int = 8, seed: int = 0) -> dict[str, TrainState]:
    """A train state with every dtype that one has, named tuples, empty states and None."""
    split, everywhere = sharding(devices, None, "x"), sharding(devices)
    draw = np.random.default_rng(seed)
    params = {
        "layers": {"kernel": jax.device_put(draw.normal(size=(3, 16)).astype(np.float32), split)},
        "scale": jax.device_put(jnp.asarray(draw.normal(size=5), jnp.bfloat16), everywhere),
        "bias": None,
        "flags": jax.device_put(draw.integers(0, 256, 16).astype(np.uint8), sharding(devices, "x")),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale_by_schedule(lambda step: 1.0))
    opt = jax.jit(tx.init)({"kernel": params["layers"]["kernel"], "scale": params["scale"]})
    opt = jax.tree.map(lambda x: x + jnp.asarray(draw.integers(1, 5), x.dtype), opt)
    counters = [jax.device_put(jnp.int32(seed + n), everywhere) for n in range(3)]
    return {"actor": TrainState(counters[0], params, opt, counters[1], counters[2])}


def like(tree: Any, place: Any = None) -> Any:
    """Shapes and dtypes, in the shardings of the arrays or all in one."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place or x.sharding), tree)


def check_equal(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype, path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def saved(folder: Path, *steps: int, config: CheckpointConfig = KEEP_ALL) -> Checkpoints:
    checkpoints = Checkpoints(folder, config)
    for step in steps:
        checkpoints.save(step, state(seed=step), {"rows": step}, {"config": {"seed": 1}})
    checkpoints.wait()
    return checkpoints


def test_every_bit_comes_back(tmp_path: Path) -> None:
    tree = state()
    special = np.array([math.nan, -math.inf, -0.0, 1e-45, 3.4e38], np.float32)
    tree["critic"] = state(seed=3)["actor"]
    odd = {"special": jax.device_put(special, sharding(8)), "yes": jax.device_put(np.array([True, False]))}
    own = {"floats": [0.1, 1 / 3, 1e-320, -0.0, math.inf], "text": "half \ud83d", "big": 2**70, "none": None}
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.save(12, {"states": tree, "odd": odd}, own, {"kl_coef": 0.1 + 0.2}, metric=0.5)
    checkpoints.wait()

    found = checkpoints.find()
    assert found is not None
    assert (found.step, found.metric, found.own, found.common) == (12, 0.5, [own], {"kl_coef": 0.30000000000000004})
    assert math.copysign(1, found.own[0]["floats"][3]) == -1
    assert found.arrays["states.actor.opt.1.mu.kernel"] == ("float32", (3, 16))
    expected = {"states": tree, "odd": odd}
    restored = checkpoints.restore(found, like(expected))
    check_equal(restored, expected)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.parametrize(
    ("devices", "axes"), [(4, (None, "x")), (2, (None, "x")), (8, (None, "y")), (8, ()), (4, (None, ("x", "y")))]
)
def test_restores_to_another_sharding(tmp_path_factory: pytest.TempPathFactory, devices: int, axes: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "elastic"
    tree = {"kernel": state(seed=7)["actor"].params["layers"]["kernel"]}
    checkpoints = Checkpoints(folder, KEEP_ALL)
    if not checkpoints.steps():
        checkpoints.save(7, tree, {}, {})
        checkpoints.wait()
    chosen = np.array(jax.devices()[:devices]).reshape(2, -1)
    place = NamedSharding(Mesh(chosen, ("x", "y")), PartitionSpec(*axes))
    found = checkpoints.find()
    assert found is not None
    restored = checkpoints.restore(found, like(tree, place))
    check_equal(restored, tree)
    assert restored["kernel"].sharding == place


def test_one_device_to_eight(tmp_path: Path) -> None:
    tree = state(devices=1)
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.save(1, tree, {}, {})
    checkpoints.wait()
    found = checkpoints.find()
    assert found is not None
    wide = like(state(devices=8))
    restored = checkpoints.restore(found, wide)
    check_equal(restored, tree)
    assert len(restored["actor"].params["layers"]["kernel"].sharding.device_set) == 8


def test_large_arrays_are_cut_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_arrays, "_CHUNK_BYTES", 512)
    tree = {"table": jax.device_put(np.arange(64 * 48, dtype=np.float32).reshape(64, 48), jax.devices()[0])}
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.save(1, tree, {}, {})
    checkpoints.wait()
    found = checkpoints.find()
    assert found is not None
    restored = checkpoints.restore(found, like(tree, sharding(8, "x")))
    check_equal(restored, tree)


def test_arrays_may_be_donated_once_save_returns(tmp_path: Path) -> None:
    change = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    place = sharding(8, "x")
    change(jax.device_put(np.zeros(1 << 20, np.float32), place)).block_until_ready()
    for trial in range(3):
        before = np.random.default_rng(trial).normal(size=1 << 20).astype(np.float32)
        array = jax.device_put(before.copy(), place)
        checkpoints = Checkpoints(tmp_path / str(trial), KEEP_ALL)
        checkpoints.save(1, {"x": array}, {}, {})
        for _ in range(5):
            array = change(array)
        array.block_until_ready()
        checkpoints.wait()
        found = checkpoints.find()
        assert found is not None
        check_equal(checkpoints.restore(found, like({"x": array})), {"x": before})


def test_own_and_common_are_those_of_the_call(tmp_path: Path) -> None:
    own, common = {"rows": [1, 2]}, {"kl": 0.5}
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.save(1, state(), own, common)
    own["rows"].append(3)
    common["kl"] = 0.0
    checkpoints.wait()
    found = checkpoints.find()
    assert found is not None
    assert (found.own, found.common) == ([{"rows": [1, 2]}], {"kl": 0.5})


def test_part_of_a_tree(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 4)
    found = checkpoints.find(4)
    assert found is not None
    part = {"actor": {"params": like(state()["actor"].params, SingleDeviceSharding(jax.devices()[0]))}}
    restored = checkpoint_read.restore(found, part, partial=True)
    check_equal(restored["actor"]["params"], state(seed=4)["actor"].params)


def test_arrays_of_another_run(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 4)
    found = checkpoints.find()
    assert found is not None
    tree: Any = like(state())
    params = tree["actor"].params
    cases = {
        "actor.params.scale was bfloat16[5] and is now float32[5]": params
        | {"scale": jax.ShapeDtypeStruct((5,), jnp.float32, sharding=sharding(8))},
        "actor.params.layers.kernel was float32[3, 16] and is now float32[3, 8]": params
        | {"layers": {"kernel": jax.ShapeDtypeStruct((3, 8), jnp.float32, sharding=sharding(8))}},
        "actor.params.flag is not there (did you mean 'actor.params.flags'?)": params | {"flag": params["flags"]},
        "actor.params.flags is there and not needed": {k: v for k, v in params.items() if k != "flags"},
    }
    for message, changed in cases.items():
        with pytest.raises(SavedRunError) as error:
            checkpoints.restore(found, {"actor": dataclasses.replace(tree["actor"], params=changed)})
        assert message in str(error.value)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    with pytest.raises(TypeError, match=r"a\.b: a checkpoint's tree holds jax arrays, and this is a float"):
        checkpoints.save(1, {"a": {"b": 0.5}}, {}, {})
    with pytest.raises(TypeError, match=r"own\.rows\[1\]: JSON cannot hold a ndarray"):
        checkpoints.save(1, state(), {"rows": [1, np.zeros(2)]}, {})
    with pytest.raises(TypeError, match=r"common\.lanes: the key 3 is not a string"):
        checkpoints.save(1, state(), {}, {"lanes": {3: 1}})
    with pytest.raises(ValueError, match=r"two arrays of a checkpoint have the name 'a\.b'"):
        checkpoints.save(1, {"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)}, {}, {})
    assert list(tmp_path.iterdir()) == []


def test_the_newest_stay_and_the_best(tmp_path: Path) -> None:
    config = CheckpointConfig(keep=2, best_metric="eval/reward", keep_best=1)
    checkpoints = Checkpoints(tmp_path, config)
    tree = {"x": jnp.zeros(3)}
    for step, metric in ((1, 0.3), (2, 0.9), (3, None), (4, 0.5), (5, None)):
        checkpoints.save(step, tree, {}, {}, metric)
    checkpoints.wait()
    assert checkpoints.steps() == [2, 4, 5]
    again = Checkpoints(tmp_path, config)
    assert again.due(6, metric=0.95)
    assert not again.due(6, metric=0.6)
    assert not again.due(5, last=True)
    again.save(6, tree, {}, {}, 0.95)
    assert not again.due(6, last=True)
    again.wait()
    assert again.steps() == [5, 6]


def test_due_by_the_clock(tmp_path: Path) -> None:
    now = [0.0]
    config = CheckpointConfig(every_steps=0, every_minutes=10)
    checkpoints = Checkpoints(tmp_path, config, clock=lambda: now[0])
    assert not checkpoints.due(1)
    now[0] = 601.0
    assert checkpoints.due(2)
    checkpoints.save(2, {"x": jnp.zeros(3)}, {}, {})
    now[0] = 1200.0
    assert not checkpoints.due(3)
    now[0] = 1202.0
    assert checkpoints.due(3)
    checkpoints.close()


def test_cut_back(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2, 3)
    (tmp_path / "step_00000004").mkdir()
    checkpoints.cut_back(2)
    assert checkpoints.steps() == [1, 2]
    assert not (tmp_path / "step_00000004").exists()
    with pytest.raises(CheckpointFailure, match=r"step_00000002: exists; a run that goes on"):
        checkpoints.save(2, state(), {}, {})
    checkpoints.cut_back(-1)
    assert list(tmp_path.iterdir()) == []
    assert checkpoints.find() is None


def test_leftovers_are_removed_at_the_start(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    half = tmp_path / "step_00000009"
    (half / "arrays.orbax-checkpoint-tmp" / "d").mkdir(parents=True)
    (half / "process_0.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("not ours")
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    assert checkpoints.steps() == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step_00000001"]


def test_metrics_of_a_save(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    found = checkpoints.metrics()
    files = [path for path in (tmp_path / "step_00000001").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files if path.name != checkpoint_files.MANIFEST)
    assert found["checkpoint/gb"] == size / 1e9
    assert 0 < found["checkpoint/pause_seconds"] < found["checkpoint/seconds"]
    assert found["checkpoint/hidden"] == 1 - found["checkpoint/pause_seconds"] / found["checkpoint/seconds"]
    assert "checkpoint/failed" not in found
    assert checkpoints.metrics() == {}


def test_poll_takes_note_of_a_save_that_ended(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, KEEP_ALL)
    checkpoints.poll()
    checkpoints.save(1, {"x": jnp.zeros(3)}, {}, {})
    while not checkpoints.metrics():
        checkpoints.poll()
    assert checkpoints.steps() == [1]


def test_folders_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SavedRunError, match=r"checkpoint.folder = .*file"):
        Checkpoints(tmp_path / "file", KEEP_ALL)
    with pytest.raises(SavedRunError, match=r"s3://bucket/run: orbax reaches local and mounted folders and gs://"):
        Checkpoints("s3://bucket/run", KEEP_ALL)
    with pytest.raises(SavedRunError, match=r"gs://bucket/run: .*gcsfs"):
        Checkpoints("gs://bucket/run", KEEP_ALL)
    with caplog.at_level(logging.WARNING):
        assert Checkpoints(tmp_path / "new" / "one", KEEP_ALL).find() is None
    assert not caplog.records


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    with pytest.raises(SavedRunError, match=r"no checkpoint of step 5; there are 1, 2"):
        checkpoints.find(5)
    with pytest.raises(SavedRunError, match=r"no checkpoint of step 5; there are none"):
        Checkpoints(tmp_path / "empty", KEEP_ALL).find(5)


def test_fingerprint() -> None:
    tree = state()
    name = fingerprint(tree)
    assert name == fingerprint(jax.device_put(tree, jax.devices()[0])) == fingerprint(state())
    kernel = tree["actor"].params["layers"]["kernel"]
    swapped = np.asarray(kernel).copy()
    swapped[0, 0], swapped[0, 1] = swapped[0, 1], swapped[0, 0]
    flipped = np.asarray(kernel).copy()
    flipped.view(np.uint32)[2, 15] ^= 1 << 31
    names = {fingerprint({"k": x}) for x in (kernel, swapped, flipped, np.asarray(kernel).reshape(16, 3))}
    names |= {fingerprint({"j": kernel}), fingerprint({"k": kernel.view(jnp.int32)})}
    assert len(names) == 6
    assert json.dumps(name) == f'"{name}"'
    assert len(name) == 16
