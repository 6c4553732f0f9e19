"""Export by several processes: each writes its share, and the folder is that of one process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.processes import run_processes


def job() -> None:
    """Exports a tiny model, lets process 1 fail, and lets it look at another folder."""
    import json
    import os
    from pathlib import Path
    from typing import Any
    from unittest import mock

    import jax

    from tests.processes import connect

    process = connect()
    from yatt_jax.io import export, tensor_files
    from yatt_jax.models.build import build
    from yatt_jax.models.config import DecoderConfig
    from yatt_jax.models.families import to_hf
    from yatt_jax.parallel.partition import Split, make_partitions

    folder = Path(os.environ["EXPORT_FOLDER"])
    config = DecoderConfig(vocab=64, hidden=16, layers=6, heads=4, kv_heads=2, head_dim=8, mlp=32, tied=False)
    values = to_hf("llama", config, 64)
    model = build("lm", config)
    train, _ = make_partitions(Split(1, jax.device_count() // 2, 2), Split(-1, 1, 2))
    params = model.init(3, train)
    written = []
    original = tensor_files.write_tensors
    export.write_tensors = lambda *arguments: written.append(original(*arguments))
    found: dict[str, Any] = {}

    def attempt(name: str, out: Path) -> None:
        try:
            export.save_folder(out, model, params, values, None, dtype="float32", shard_bytes=12_000)
            found[name] = "exported"
        except export.ExportError as error:
            found[name] = str(error)

    attempt("whole", folder / "whole")
    found["bytes"], found["peak"] = written[0].bytes, written[0].peak
    found["seen"] = (folder / "whole" / "config.json").is_file()
    if process == 1:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with mock.patch.object(tensor_files._Writer, "_write", full):
            attempt("full disk", folder / "whole")
    else:
        attempt("full disk", folder / "whole")
    export._APPEARS_WITHIN = 0.3
    attempt("not shared", folder / (f"own{process}" if process == 1 else "common"))
    attempt("again", folder / "whole")
    print(json.dumps(found))


def alone(folder: Path) -> None:
    """The same model from the devices of this process."""
    from yatt_jax.io.export import save_folder
    from yatt_jax.models.build import build
    from yatt_jax.models.config import DecoderConfig
    from yatt_jax.models.families import to_hf
    from yatt_jax.parallel.partition import Split, make_partitions

    config = DecoderConfig(vocab=64, hidden=16, layers=6, heads=4, kv_heads=2, head_dim=8, mlp=32, tied=False)
    train, _ = make_partitions(Split(-1, 1, 1), Split(-1, 1, 1))
    model = build("lm", config)
    save_folder(folder, model, model.init(3, train), to_hf("llama", config, 64), None, dtype="float32")


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_processes(processes, devices, tmp_path):
    done = run_processes(job, processes, devices, timeout=120, env={"EXPORT_FOLDER": str(tmp_path)})
    found = [json.loads(one.stdout.splitlines()[-1]) for one in done]
    assert all(one["whole"] == "exported" and one["seen"] for one in found)

    alone(tmp_path / "alone")
    expected = load_file(tmp_path / "alone" / "model.safetensors")
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "whole").glob("*.safetensors"))
    assert set(index["weight_map"]) == set(expected)
    read: dict[str, np.ndarray] = {}
    for file in files:
        tensors = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in tensors)
        assert not tensors.keys() & read.keys()
        read |= tensors
    for name, tensor in expected.items():
        np.testing.assert_array_equal(read[name], tensor)
    for name in ("config.json", "generation_config.json", "README.md"):
        ours, theirs = ((tmp_path / one / name).read_text() for one in ("whole", "alone"))
        assert ours == theirs.replace("# alone", "# whole")

    total, largest = (f(tensor.nbytes for tensor in expected.values()) for f in (sum, max))
    assert index["metadata"]["total_size"] == total == sum(one["bytes"] for one in found)
    assert all(abs(one["bytes"] - total / processes) <= largest for one in found)
    assert all(one["peak"] <= largest for one in found)

    for process, one in enumerate(found):
        assert "the disk is full" in one["full disk"]
        assert ("process 1 could not do its share" in one["full disk"]) == (process != 1)
        assert "process 1 does not see" in one["not shared"]
        assert one["again"] == "exported"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "whole"]  # no leftover of what failed
