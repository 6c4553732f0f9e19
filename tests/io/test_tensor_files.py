"""Files of an export: who writes what, the bytes of the format, and how much is held at a time."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from yatt_jax.io import tensor_files
from yatt_jax.io.tensor_files import check_written, owners, plan_files, tensor_shapes, weight_map, write_tensors
from yatt_jax.io.tensors import ExportError
from yatt_jax.models.build import build
from yatt_jax.models.config import DecoderConfig
from yatt_jax.models.families import FAMILIES
from yatt_jax.models.names import leaves_of
from yatt_jax.parallel.partition import Split, make_partitions

SHAPES = {"a": (4, 2), "b": (3,), "c": (2, 3), "d": (1,), "e": (5,)}  # 32, 12, 24, 4, 20 bytes in float32


def described(files) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(file.name, file.process, file.tensors) for file in files]


def test_one_process_fills_one_file_after_the_other():
    assert described(plan_files(SHAPES, "float32", [0], 10**9)) == [("model.safetensors", 0, ("a", "b", "c", "d", "e"))]
    assert described(plan_files(SHAPES, "float32", [0], 40)) == [
        ("model-00001-of-00003.safetensors", 0, ("a",)),
        ("model-00002-of-00003.safetensors", 0, ("b", "c", "d")),
        ("model-00003-of-00003.safetensors", 0, ("e",)),
    ]
    assert described(plan_files(SHAPES, "float32", [0], 1))[0][2] == ("a",)  # larger than a file may be: alone


def test_processes_are_dealt_tensors_by_bytes():
    files = plan_files(SHAPES, "float32", [0, 1], 10**9)
    assert described(files) == [
        ("model-00001-of-00002.safetensors", 0, ("a", "d", "e")),  # 32, 36, 56: of equals the first
        ("model-00002-of-00002.safetensors", 1, ("b", "c")),  # 12, 36
    ]
    assert weight_map(files)["c"] == "model-00002-of-00002.safetensors"
    assert [f.process for f in plan_files(SHAPES, "float32", [3, 7], 30)] == [3, 3, 7, 7]
    assert len(plan_files({"a": (2,)}, "float32", range(4), 10**9)) == 1  # the others have nothing to write


def test_as_many_bytes_for_each_process():
    shapes = {f"{kind}.{layer}": shape for kind, shape in (("q", (64, 64)), ("up", (64, 200))) for layer in range(30)}
    sizes: dict[int, int] = {}
    for file in plan_files(shapes, "bfloat16", range(4), 10_000):
        sizes[file.process] = sizes.get(file.process, 0) + file.size - len(file.header)
    total = sum(sizes.values())
    assert total == 30 * (64 * 64 + 64 * 200) * 2
    assert all(abs(size - total / 4) <= 64 * 200 * 2 for size in sizes.values())


def test_the_header():
    (file,) = plan_files({"w": (2, 3), "b": (3,)}, "bfloat16", [0], 100)
    length = int.from_bytes(file.header[:8], "little")
    assert len(file.header) == 8 + length
    assert length % 8 == 0
    assert file.size == len(file.header) + 18
    assert json.loads(file.header[8:]) == {
        "__metadata__": {"format": "pt", "written_by": "yatt_jax"},
        "w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [12, 18]},
    }


@pytest.fixture(scope="module")
def sharded():
    """Leaves and parameters of a small Llama over eight devices."""
    config = DecoderConfig(vocab=40, hidden=16, layers=3, heads=4, kv_heads=2, head_dim=8, mlp=24, tied=False)
    model = build("lm", config)
    train, _ = make_partitions(Split(1, 4, 2), Split(-1, 1, 2))
    params = jax.tree.map(lambda x: x * 1.3 + 1e-6, model.init(1, train))
    return leaves_of(FAMILIES["llama"].names, model.abstract), params


def write(folder, sharded, dtype="float32", shard_bytes=10**9):
    leaves, params = sharded
    files = plan_files(tensor_shapes(leaves), dtype, owners(params), shard_bytes)
    written = write_tensors(folder, files, leaves, params, dtype)
    check_written(folder, files)
    return files, written


def test_values(sharded, tmp_path):
    _, written = write(tmp_path, sharded)
    read = load_file(tmp_path / "model.safetensors")
    _, params = sharded
    assert written.bytes == sum(x.nbytes for x in jax.tree.leaves(params)) == sum(x.nbytes for x in read.values())
    q = np.asarray(params["decoder"]["layers"]["attention"]["q"]["kernel"])  # layer, D, H, K
    o = np.asarray(params["decoder"]["layers"]["attention"]["o"]["kernel"])  # layer, H, K, D
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn."
        np.testing.assert_array_equal(read[prefix + "q_proj.weight"], q[layer].reshape(16, 32).T)
        np.testing.assert_array_equal(read[prefix + "o_proj.weight"], o[layer].reshape(32, 16).T)
    np.testing.assert_array_equal(read["model.embed_tokens.weight"], np.asarray(params["decoder"]["embedding"]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrower_types_round_as_the_host_does(dtype, sharded, tmp_path):
    leaves, params = sharded
    # From 1e-8 up: what float16 holds as zero or a subnormal number is rounded as well, and not flushed.
    small = np.geomspace(1e-8, 1, 16, dtype=np.float32)
    embedding = np.asarray(params["decoder"]["embedding"]) * small
    placed = jax.device_put(embedding, params["decoder"]["embedding"].sharding)
    params = params | {"decoder": params["decoder"] | {"embedding": placed}}
    write(tmp_path, (leaves, params), dtype)
    assert np.mean(np.abs(embedding) < 6e-5) > 0.3
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        stored = file.get_tensor("model.embed_tokens.weight")
    assert stored.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(stored.view(np.uint16), embedding.astype(jnp.dtype(dtype)).view(np.uint16))


def test_one_tensor_at_a_time_on_the_host_and_three_on_the_devices(sharded, tmp_path, monkeypatch):
    leaves, _ = sharded
    largest = max(int(np.prod(shape)) * 4 for shape in tensor_shapes(leaves).values())
    before = {id(array) for array in jax.live_arrays()}
    extra: list[int] = []
    running: list[int] = []
    original = tensor_files._Writer._write

    def watched(self, name, box):
        running.append(1)
        assert len(running) == 1
        extra.append(sum(array.nbytes for array in jax.live_arrays() if id(array) not in before))
        original(self, name, box)
        running.pop()

    monkeypatch.setattr(tensor_files._Writer, "_write", watched)
    _, written = write(tmp_path, sharded, shard_bytes=1000)
    assert written.peak == largest
    assert len(extra) == len(tensor_shapes(leaves))
    assert 0 < max(extra) <= 3 * largest
    assert written.bytes > 5 * largest


def test_the_writing_of_a_tensor_does_not_hold_up_the_next_move(sharded, tmp_path, monkeypatch):
    """The first write waits for the third move to have begun."""
    moved, third = [], threading.Event()
    original_moves, original_write = tensor_files._moves, tensor_files._Writer._write

    def moves(*arguments) -> Iterator:
        for move in original_moves(*arguments):
            moved.append(move[0])
            if len(moved) == 3:
                third.set()
            yield move

    def slow(self, name, box):
        assert third.wait(20)
        original_write(self, name, box)

    monkeypatch.setattr(tensor_files, "_moves", moves)
    monkeypatch.setattr(tensor_files._Writer, "_write", slow)
    write(tmp_path, sharded)


def test_a_file_that_is_missing_or_cut_short(sharded, tmp_path):
    files, _ = write(tmp_path, sharded, shard_bytes=3000)
    second = tmp_path / files[1].name
    content = second.read_bytes()
    second.write_bytes(content[:-1])
    with pytest.raises(ExportError, match=rf"{second.name}: has {len(content) - 1} bytes .* process 0 has written"):
        check_written(tmp_path, files)
    second.unlink()
    with pytest.raises(ExportError, match=rf"{second.name}: process 0 has written this file, and process 0 does not"):
        check_written(tmp_path, files)


def test_the_rest_of_the_moves_goes_on_after_a_failure(sharded, tmp_path, monkeypatch):
    moved = []
    original = tensor_files._moves

    def moves(*arguments) -> Iterator:
        for move in original(*arguments):
            moved.append(move[0])
            yield move

    monkeypatch.setattr(tensor_files, "_moves", moves)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write(tmp_path / "nowhere", sharded)
    assert len(moved) == len(tensor_shapes(sharded[0]))


@pytest.fixture
def small_disk(tmp_path) -> Iterator:
    """A file system of 16 kB, where the machine lets tests make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("no right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(sharded, small_disk):
    with pytest.raises(OSError, match="No space left"):
        write(small_disk, sharded)
