"""Damaged files, full disks and killed processes: the last whole checkpoint is found, and nothing else."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from yatt_jax.io import checkpoint_files, checkpoint_read
from yatt_jax.io.checkpoint import Checkpoints
from yatt_jax.io.checkpoint_arrays import ArrayWriter
from yatt_jax.io.checkpoint_config import CheckpointConfig
from yatt_jax.io.checkpoint_files import CheckpointFailure, Manifest, SavedRunError

ROOT = Path(__file__).parents[2]


def tree(step: int) -> dict[str, jax.Array]:
    """Large enough for values to lie in a file of their own."""
    return {"x": jnp.arange(4000, dtype=jnp.float32) + step, "y": jnp.int32(step)}


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, tree(step), {"rows": [step] * 50}, {"config": {"seed": step}})
    checkpoints.wait()


def check(checkpoints: Checkpoints, step: int) -> None:
    found = checkpoints.find()
    assert found is not None
    assert found.step == step
    restored = checkpoints.restore(found, tree(0))
    np.testing.assert_array_equal(restored["x"], np.arange(4000, dtype=np.float32) + step)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with steps 1 and 2."""
    folder = tmp_path_factory.mktemp("whole")
    checkpoints = Checkpoints(folder, CheckpointConfig())
    save(checkpoints, 1)
    save(checkpoints, 2)
    checkpoints.close()
    return folder


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1 << (len(content) % 8)
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b" ")


def swap_tail(file: Path) -> None:
    """The same size, other content."""
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")


@pytest.mark.parametrize("damage", [flip, truncate, lengthen, swap_tail, lambda file: file.unlink()])
def test_each_file_that_is_damaged_is_named_and_passed_over(
    damage: Callable[[Path], None], whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = checkpoint_files.list_files(epath.Path(whole / "step_00000002"))
    kinds = {"checkpoint.json", "common.json", "process_0.json", "arrays/manifest.ocdbt", "arrays/_METADATA"}
    assert kinds <= set(names)
    assert any("/d/" in name for name in names)
    for name in names:
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        file = copy / "step_00000002" / name
        damage(file)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = checkpoint_read.find(epath.Path(copy))
        if found is not None and found.step == 2:  # white space after the manifest changes nothing
            assert name == "checkpoint.json"
            assert damage is lengthen
        else:
            assert found is not None
            assert found.common == {"config": {"seed": 1}}
            if name != "checkpoint.json" or file.exists():
                assert str(file) in caplog.text
                with pytest.raises(SavedRunError, match=r"there are also checkpoints of steps 1"):
                    checkpoint_read.find(epath.Path(copy), 2)
        shutil.rmtree(copy)


def test_all_are_damaged(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    for step in (1, 2):
        flip(folder / f"step_0000000{step}" / "common.json")
    with pytest.raises(SavedRunError, match=r"no checkpoint can be used .*step_00000002/common.json: damaged"):
        checkpoint_read.find(epath.Path(folder))


def test_goes_on_from_the_one_before(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    (folder / "step_00000002" / "process_0.json").unlink()
    checkpoints = Checkpoints(folder, CheckpointConfig())
    check(checkpoints, 1)
    checkpoints.cut_back(1)
    save(checkpoints, 2)
    check(checkpoints, 2)


def test_a_folder_that_was_renamed(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "step_00000002", tmp_path / "step_00000007")
    with pytest.raises(SavedRunError, match=r"of step 2: the folder has been renamed"):
        checkpoint_read.find(epath.Path(tmp_path))


def test_a_manifest_of_a_later_version(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest(3, 0.1, 1, {"x": ("float32", (2, 3))}, {"a": checkpoint_files.FileSum(5, "00")})
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    monkeypatch.setattr(checkpoint_files, "_FORMAT", 2)
    raw = manifest.to_bytes()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="another version"):
        Manifest.from_bytes(raw)


@pytest.mark.parametrize("place", ["arrays", "files", "manifest", "deleting"])
def test_a_save_that_fails(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_arrays(writer: ArrayWriter) -> None:
        finish(writer)
        full()

    def full_manifest(file: epath.Path, content: bytes) -> None:
        return full() if file.name == checkpoint_files.MANIFEST else original(file, content)

    original, finish = checkpoint_files.write_whole, ArrayWriter.finish
    stop, warn = (Checkpoints(tmp_path, CheckpointConfig(keep=1, on_failure=how)) for how in ("stop", "warn"))
    save(stop, 1)
    with monkeypatch.context() as patch:
        if place == "arrays":
            patch.setattr(ArrayWriter, "finish", full_arrays)
        elif place == "files":
            patch.setattr(checkpoint_files, "sum_files", full)
        elif place == "manifest":
            patch.setattr(checkpoint_files, "write_whole", full_manifest)
        else:
            patch.setattr(checkpoint_files, "remove", full)
            save(stop, 2)  # the new one exists, so nothing has failed
            assert stop.steps() == [1, 2]
            return
        with pytest.raises(CheckpointFailure, match=r"step 2 was not written: .*the disk is full \(.*B free\)"):
            save(stop, 2)
        save(warn, 2)
        save(warn, 3)
        assert warn.metrics() == {"checkpoint/failed": 2.0}
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    check(warn, 1)
    save(warn, 4)
    check(warn, 4)


def run_program(program: str, *arguments: str, prefix: tuple[str, ...] = ()) -> str:
    """Runs Python source in a process of its own, with two CPU devices."""
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [*prefix, sys.executable, "-c", program, *arguments],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


FULL_DISK = """
import logging, os, sys
import jax, jax.numpy as jnp
from yatt_jax.io import checkpoint_files
from yatt_jax.io.checkpoint import Checkpoints
from yatt_jax.io.checkpoint_config import CheckpointConfig

logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s", force=True)
folder, place = sys.argv[1], jax.sharding.SingleDeviceSharding(jax.devices()[0])

def save(checkpoints, step):
    checkpoints.save(step, {"x": jnp.full(500_000, step, jnp.float32)}, {}, {})
    checkpoints.wait()

def last(checkpoints):
    found = checkpoints.find()
    value = checkpoints.restore(found, {"x": jax.ShapeDtypeStruct((500_000,), jnp.float32, sharding=place)})["x"]
    assert (value == found.step).all()
    return found.step, sorted(os.listdir(folder))

def fill(but):
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with open(folder + "/filler", "wb") as out:
        out.write(bytes(free - but))

warn, stop = (Checkpoints(folder, CheckpointConfig(on_failure=how)) for how in ("warn", "stop"))
save(warn, 1)
fill(but=1_000_000)
save(warn, 2)                                      # told before a byte is written
print(last(warn))
free_bytes, asked = checkpoint_files.free_bytes, []
def unknown_at_first(folder):
    asked.append(folder)
    return free_bytes(folder) if len(asked) % 2 == 0 else None
checkpoint_files.free_bytes = unknown_at_first
for step in (3, 4):
    save(warn, step)                               # told by the file system, half way
    print(last(warn))
checkpoint_files.free_bytes = free_bytes
try:
    save(stop, 5)
except checkpoint_files.CheckpointFailure as error:
    print("stopped:", error)
print(warn.metrics())
os.unlink(folder + "/filler")
save(warn, 6)
print(last(warn))
"""


def test_full_disk(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=8m tmpfs {tmp_path} && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", mount, "sh")
    allowed = shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True, check=False)
    if not allowed or allowed.returncode:
        pytest.skip("a small disk cannot be mounted here: no right to")
    lines = run_program(FULL_DISK, str(tmp_path), prefix=prefix).splitlines()
    failures = [line for line in lines if "was not written" in line]
    assert len(failures) == 4
    for step, line in zip((2, 3, 4), failures[:3], strict=True):
        assert line.startswith(f"the checkpoint of step {step} was not written; the run goes on. {tmp_path}:")
        assert "the disk is full (" in line
        assert "MB free)" in line
    assert "a checkpoint needs 2.00 MB" in failures[0]
    assert failures[3].startswith("stopped: the checkpoint of step 5 was not written")
    kept = str((1, ["filler", "step_00000001"]))
    assert lines.count(kept) == 3
    assert any("'checkpoint/failed': 3.0" in line for line in lines)
    assert not any("Traceback" in line for line in lines)
    assert lines[-1] == str((6, ["step_00000001", "step_00000006"]))


KILLED = """
import json, os, random, signal, sys, time
import jax, jax.numpy as jnp
from etils import epath
from yatt_jax.io import checkpoint, checkpoint_arrays, checkpoint_files, checkpoint_read
from yatt_jax.io.checkpoint_config import CheckpointConfig

# Of each process, the moment of its save at which it dies (0: at a random one of many saves; 99: not at all).
folder, moments = sys.argv[1], json.loads(sys.argv[2])

def tree(step):
    return {"x": jnp.full(50_000, step, jnp.float32), "n": jnp.int32(step)}

def die_at(n):
    # Ends this process at the n-th of the moments that a save consists of.
    left = [n]
    def moment():
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    def wrap(owner, name):
        original = getattr(owner, name)
        def wrapped(*arguments, **named):
            moment()
            result = original(*arguments, **named)
            moment()
            return result
        setattr(owner, name, wrapped)
    writer, files = checkpoint_arrays.ArrayWriter, checkpoint_files
    for owner, name in ((writer, "start"), (writer, "finish"), (files, "write_whole"), (files, "sum_files"),
                        (files, "remove"), (os, "replace"), (type(epath.Path("/")), "rmtree")):
        wrap(owner, name)

def child(tell, moment):
    checkpoints = checkpoint.Checkpoints(folder, CheckpointConfig(keep=2))
    found = checkpoints.find()
    step = 0
    if found is not None:
        step = found.step
        assert (found.own, found.common) == ([{"step": step}], {"step": step}), found
        value = checkpoints.restore(found, tree(0))
        assert (value["x"] == step).all() and value["n"] == step
    assert not [path for path in os.listdir(folder) if int(path[5:]) not in checkpoints.steps()], os.listdir(folder)
    checkpoints.cut_back(step)
    jax.block_until_ready(tree(step))
    if moment:
        die_at(moment)
    os.write(tell, b".")
    for step in range(step + 1, step + 2 if moment else 10**6):
        checkpoints.save(step, tree(step), {"step": step}, {"step": step})
        checkpoints.wait() if moment else checkpoints.poll()
    os._exit(9)

last, halves, ended = -1, 0, []
for trial, moment in enumerate(moments):
    hear, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(tell, moment)
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(3)
    os.close(tell)
    started = os.read(hear, 1)
    os.close(hear)
    if not moment and started:
        time.sleep(random.Random(trial).uniform(0, 0.4))
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ended.append(code)
    assert code in (-9, 9), (trial, code)
    here = epath.Path(folder)
    steps = checkpoint_files.committed(here)
    halves += len(checkpoint_files.step_folders(here)) > len(steps)
    found = checkpoint_read.find(here)
    assert (found.step if found else -1) == max(steps, default=-1) >= last, (steps, found, last)
    last = max(steps, default=-1)
print(json.dumps({"last": last, "halves": halves, "ended": ended}))
"""


MOMENTS = 26  # before and after each part of a save, the deletion of an old checkpoint among them


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_moment_of_a_save(stride: int, tmp_path: Path) -> None:
    moments = [*range(1, MOMENTS + 1, stride)]
    found = json.loads(run_program(KILLED, str(tmp_path), json.dumps([99, 99, *moments, 99])).splitlines()[-1])
    assert found["ended"] == [9, 9, *[-9] * len(moments), 9]
    assert found["halves"] >= len(moments) // 2
    assert found["last"] < len(moments) + 3


@pytest.mark.parametrize("times", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_at_random(times: int, tmp_path: Path) -> None:
    found = json.loads(run_program(KILLED, str(tmp_path), json.dumps([0] * times)).splitlines()[-1])
    assert found["ended"] == [-9] * times
    assert found["last"] >= times // 2
