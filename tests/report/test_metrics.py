"""Metrics: one transfer, right means, sinks that fail without harm."""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from yatt_jax.report import sinks
from yatt_jax.report.metrics import JsonlSink, MetricsWriter, grouped, to_floats
from yatt_jax.report.rundir import RunDir, RunDirError
from yatt_jax.report.sinks import TensorboardSink, open_optional
from yatt_jax.types import Max, Ratio


def test_ratios_are_added_up_before_they_are_divided() -> None:
    first = {"loss": Ratio(jnp.float32(3), jnp.float32(1)), "top": Max(jnp.float32(2)), "lr": jnp.float32(0.1)}
    second = {"loss": Ratio(jnp.float32(1), jnp.float32(3)), "top": Max(jnp.float32(-5)), "lr": jnp.float32(0.2)}
    assert to_floats([first, second]) == {"loss": 1.0, "top": 2.0, "lr": 0.2}
    assert to_floats(second) == {"loss": pytest.approx(1 / 3), "top": -5.0, "lr": 0.2}


def test_many_small_counts_are_added_up_without_loss() -> None:
    part = {"share": Ratio(jnp.float32(1), jnp.float32(2**24))}
    assert to_floats([part, {"share": Ratio(jnp.float32(1), jnp.float32(1))}, part])["share"] == pytest.approx(
        3 / (2**25 + 1), rel=1e-6
    )


def test_no_data_is_nan_and_names_keep_their_order() -> None:
    found = to_floats({"z": Ratio(jnp.float32(0), jnp.float32(0)), "b": 1, "a": np.float64(1 / 3), "c": jnp.int32(7)})
    assert list(found) == ["z", "b", "a", "c"]
    assert math.isnan(found["z"])
    assert found["a"] == 1 / 3
    assert (found["b"], found["c"]) == (1.0, 7.0)


def test_a_metric_that_is_not_a_scalar_is_named() -> None:
    with pytest.raises(TypeError, match=r"metric kl has shape \(2,\)"):
        to_floats({"kl": jnp.zeros(2)})


def test_one_transfer_however_many_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: calls.append(1) or get(tree))
    to_floats([{f"m{i}": Ratio(jnp.float32(i), jnp.float32(1)) for i in range(20)}] * 3)
    assert len(calls) == 1


def test_grouped() -> None:
    assert grouped("train", {"loss": 1.0}) == {"train/loss": 1.0}


class Recorder:
    name = "recorder"

    def __init__(self, error: Exception | None = None):
        self.error = error
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.error:
            raise self.error
        self.seen.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def test_an_optional_sink_that_fails_is_reported_once_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, good = Recorder(ConnectionError("no route to host")), Recorder()
    broken.name = "wandb"
    writer = MetricsWriter([JsonlSink(RunDir.open(tmp_path))], [broken, good])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            writer.step(step, {"train/loss": math.nan, "rollout/reward": 0.5})
    messages = [r.getMessage() for r in caplog.records]
    assert messages == [
        "wandb failed (ConnectionError: no route to host); the run goes on, and metrics.jsonl holds everything"
    ]
    assert [step for step, _ in good.seen] == [1, 2, 3]
    broken.error = None
    writer.step(4, {})
    assert broken.seen == [(4, {})]
    writer.close()
    assert good.closed
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found[0] == {"step": 1, "train/loss": None, "rollout/reward": 0.5}
    assert len(found) == 4


def test_a_required_sink_that_fails_stops_the_run() -> None:
    with pytest.raises(RunDirError, match="full"):
        MetricsWriter([Recorder(RunDirError("the disk is full"))]).step(1, {})


def events(folder: Path) -> list[Any]:
    """Every event of every file, oldest file first."""
    from tensorboardX.proto import event_pb2

    messages: Any = event_pb2
    found = []
    for file in sorted(folder.iterdir(), key=lambda f: f.stat().st_mtime_ns):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack("<Q", data[at : at + 8])
            found.append(messages.Event.FromString(data[at + 12 : at + 12 + size]))
            at += 16 + size
    return found


def test_tensorboard_events(tmp_path: Path) -> None:
    sink = TensorboardSink(tmp_path)
    sink.write(7, {"rollout/reward": 0.25, "train/loss": math.nan})
    (event,) = [e for e in events(tmp_path) if e.HasField("summary")]  # readable before the file is closed
    assert event.step == 7
    assert [(v.tag, v.simple_value) for v in event.summary.value] == [("rollout/reward", 0.25)]
    sink.close()


def test_tensorboard_hides_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    sink = TensorboardSink(tmp_path, resume_step=4)
    sink.close()
    (start,) = [e for e in events(tmp_path) if e.HasField("session_log")]
    assert (start.step, start.session_log.status) == (5, 1)


def test_wandb_that_is_not_installed_is_an_error_that_says_how(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "yatt_jax\[wandb\]"'):
        open_optional(RunDir.open(tmp_path), {}, tensorboard=False, wandb_project="p")


def test_a_sink_that_cannot_be_opened_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    monkeypatch.setattr(sinks, "require_wandb", lambda: None)
    monkeypatch.setattr(sinks, "WandbSink", lambda *a: (_ for _ in ()).throw(OSError("unreachable")))
    with caplog.at_level(logging.WARNING):
        assert open_optional(RunDir.open(tmp_path), {}, tensorboard=True, wandb_project="p") == []
    assert "TensorBoard could not be opened (FileExistsError" in caplog.records[0].getMessage()
    assert "wandb could not be opened (OSError: unreachable)" in caplog.records[1].getMessage()


def test_wandb_continues_the_run_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    started: list[dict[str, Any]] = []
    logged: list[Any] = []
    run = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)
    fake = types.ModuleType("wandb")
    fake.__dict__["init"] = lambda **settings: started.append(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(sinks, "require_wandb", lambda: None)
    for name in ("one", "one", "two"):
        (sink,) = open_optional(
            RunDir.open(tmp_path / name / "run"), {"a": math.inf}, tensorboard=False, wandb_project="p"
        )
        sink.write(3, {"x": 1.0, "y": math.nan})
    assert started[0]["id"] == started[1]["id"] != started[2]["id"]
    assert (started[0]["project"], started[0]["name"], started[0]["config"]) == ("p", "run", {"a": None})
    assert logged[0] == (3, {"x": 1.0})
