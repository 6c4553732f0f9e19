"""Several processes: each writes its share, any number reads it, and all agree on what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.processes import run_processes
from yatt_jax.io.checkpoint import Checkpoints
from yatt_jax.io.checkpoint_config import CheckpointConfig


def job() -> None:
    """Restores what is there, or makes it; saves; lets one process fail in several ways."""
    import errno
    import json
    import os

    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from yatt_jax.controller.hosts import ControllerConfig, join
    from yatt_jax.io import checkpoint_arrays, checkpoint_files
    from yatt_jax.io.checkpoint import Checkpoints
    from yatt_jax.io.checkpoint_config import CheckpointConfig

    folder, task = os.environ["CHECKPOINT_FOLDER"], os.environ["CHECKPOINT_TASK"]
    address, count, process = (os.environ[f"YATT_TEST_{name}"] for name in ("COORDINATOR", "PROCESSES", "PROCESS"))
    with join(ControllerConfig(), address, int(count), int(process)) as hosts:
        mesh = Mesh(np.array(jax.devices()), ("x",))
        split, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
        values = np.arange(8 * 6000, dtype=np.float32).reshape(8, 6000)

        def tree(step: int) -> dict[str, jax.Array]:
            make = jax.make_array_from_callback
            return {
                "split": make(values.shape, split, lambda index: values[index] + step),
                "everywhere": make((5,), everywhere, lambda index: np.full(5, step, np.int32)[index]),
            }

        def check(found: object) -> None:
            restored = checkpoints.restore(found, tree(0))  # pyright: ignore[reportArgumentType]
            for name, expected in tree(found.step).items():  # pyright: ignore[reportAttributeAccessIssue]
                for a, b in zip(restored[name].addressable_shards, expected.addressable_shards, strict=True):
                    assert a.index == b.index
                    np.testing.assert_array_equal(a.data, b.data)

        def save(step: int) -> None:
            checkpoints.save(step, tree(step), {"process": hosts.process}, {"by": hosts.process}, metric=step / 2)

        said = {}
        checkpoints = Checkpoints(folder, CheckpointConfig(on_failure="warn", keep=3), hosts)
        found = checkpoints.find()
        if found is not None:
            check(found)
            said["own"] = [found.step, found.own, found.common, found.metric]
        if task == "fail":
            original = checkpoint_files.write_whole

            def full(file: object, content: bytes) -> None:
                if hosts.process == 1:
                    raise OSError(errno.ENOSPC, "No space left on device")
                original(file, content)  # pyright: ignore[reportArgumentType]

            checkpoint_files.write_whole = full
            save(50)
            checkpoints.wait()
            checkpoint_files.write_whole = original
            finish = checkpoint_arrays.ArrayWriter.finish

            def lost(self: checkpoint_arrays.ArrayWriter) -> None:
                finish(self)
                if hosts.process == 1:
                    raise ValueError("a disk went away")

            checkpoint_arrays.ArrayWriter.finish = lost
            save(51)
            checkpoints.wait()
            checkpoint_arrays.ArrayWriter.finish = finish
            said["failed"] = checkpoints.failures
            said["after"] = checkpoints.steps()
        first = checkpoints.steps()[-1] + 1 if checkpoints.steps() else 1
        for step in range(first, first + 2):
            assert checkpoints.due(step, last=True)
            save(step)
            assert not checkpoints.due(step, last=True)
        while "checkpoint/gb" not in (figures := checkpoints.metrics()):
            checkpoints.poll()
        said["figures"] = sorted(figures)
        checkpoints.wait()
        said["steps"] = checkpoints.steps()
        check(checkpoints.find())
        print(json.dumps(said), flush=True)
        checkpoints.close()


def run(folder: Path, processes: int, devices: int, task: str = "save") -> list[dict[str, Any]]:
    environment = {"CHECKPOINT_FOLDER": str(folder), "CHECKPOINT_TASK": task}
    done = run_processes(job, processes, devices, timeout=150, env=environment)
    return [json.loads(one.stdout.splitlines()[-1]) for one in done]


def check_here(folder: Path, step: int) -> None:
    """One process reads it into another sharding."""
    checkpoints = Checkpoints(folder, CheckpointConfig())
    found = checkpoints.find(step)
    assert found is not None
    place = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    shapes = {"split": ((8, 6000), np.float32), "everywhere": ((5,), np.int32)}
    restored = checkpoints.restore(
        found, {name: jax.ShapeDtypeStruct(*about, sharding=place) for name, about in shapes.items()}
    )
    expected = np.arange(8 * 6000, dtype=np.float32).reshape(8, 6000) + step
    np.testing.assert_array_equal(restored["split"], expected)
    np.testing.assert_array_equal(restored["everywhere"], np.full(5, step, np.int32))


def test_two_processes_and_then_one(tmp_path: Path) -> None:
    found = run(tmp_path, 2, 2, "fail")
    for one in found:
        assert one["failed"] == 2
        assert one["after"] == []
        assert one["steps"] == [1, 2]
        assert "checkpoint/gb" in one["figures"]
    check_here(tmp_path, 2)
    assert not list(tmp_path.rglob("part_*"))
    assert len({path.name for path in (tmp_path / "step_00000002").glob("process_*.json")}) == 2


@pytest.mark.slow
def test_from_one_to_two_to_four_processes(tmp_path: Path) -> None:
    run(tmp_path, 1, 4)
    for one in run(tmp_path, 2, 2):
        assert one["own"] == [2, [{"process": 0}], {"by": 0}, 1.0]
        assert one["steps"] == [2, 3, 4]
    for one in run(tmp_path, 4, 1):
        assert one["own"] == [4, [{"process": 0}, {"process": 1}], {"by": 0}, 2.0]
        assert one["steps"] == [4, 5, 6]
    (only,) = run(tmp_path, 1, 1)
    assert only["own"] == [6, [{"process": n} for n in range(4)], {"by": 0}, 3.0]
    check_here(tmp_path, 8)
