"""``tools.convert_hf RUN_DIR[@STEP]`` writes a model of a run's checkpoint as a stock folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.controller import tiny
from tools.convert_hf import main as convert_main
from yatt_jax.algos import ppo
from yatt_jax.config import parse, to_dict
from yatt_jax.controller.plan import make_plan
from yatt_jax.io.checkpoint import Checkpoints
from yatt_jax.io.checkpoint_config import CheckpointConfig
from yatt_jax.io.hf import load_model, read_folder
from yatt_jax.report.rundir import RunDir
from yatt_jax.types import Params


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict[tuple[int, str], Params]]:
    """A run directory with the checkpoints of two steps, and the parameters in them."""
    folder = tmp_path_factory.mktemp("convert")
    config = parse(tiny.config(folder, parallel__train__fsdp=4, parallel__train__data=2))
    plan = make_plan(config)
    directory = RunDir.open(folder / "run")
    directory.write_config(to_dict(config), {"versions": {"jax": "0.10"}})
    saved: dict[tuple[int, str], Params] = {}
    checkpoints = Checkpoints(folder / "run" / "checkpoints", CheckpointConfig(keep=2))
    for step in (1, 2):
        states: dict[str, Any] = {}
        for number, role in enumerate(("actor", "critic")):
            params = plan.models[role].init(10 * step + number, plan.train)
            saved[step, role] = params
            states[role] = {"params": params, "opt": {"mu": jax.tree.map(lambda x: -x, params)}}
        checkpoints.save(step, states, {}, {})
        checkpoints.wait()
        directory.append("metrics", {"step": step, "rollout/reward": 0.5 * step})
    checkpoints.close()
    directory.close()
    return folder / "run", saved


def assert_same(a: Params, b: Params) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_the_newest(run, tmp_path, one_device, capsys):
    folder, saved = run
    out = tmp_path / "out"
    assert convert_main([str(folder), str(out)]) == 0
    assert capsys.readouterr().out.rstrip().endswith(" M parameters, lm, float32")
    _, params = load_model(out, "lm", one_device)
    assert_same(params, saved[2, "actor"])
    assert AutoTokenizer.from_pretrained(out)("a bad")["input_ids"]
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    card = (out / "README.md").read_text()
    assert "trained with ppo for 2 steps" in card
    assert "| rollout/reward | 1 | 2 |" in card
    assert "- jax 0.10" in card


def test_a_step_and_the_critic(run, tmp_path, one_device):
    folder, saved = run
    out = tmp_path / "out"
    assert convert_main([f"{folder}@1", str(out), "--role", "critic", "--shard_gb", "0.00001"]) == 0
    assert len(list(out.glob("*.safetensors"))) > 1
    _, params = load_model(out, "value", one_device)
    assert_same(params, saved[1, "critic"])
    assert read_folder(out).architectures == ("LlamaForTokenClassification",)
    card = (out / "README.md").read_text()
    assert "critic" in card
    assert "for 1 step." in card
    assert "| rollout/reward | 0.5 | 1 |" in card


def test_another_dtype(run, tmp_path, one_device):
    folder, saved = run
    assert convert_main([str(folder), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    _, params = load_model(tmp_path / "out", "lm", one_device, dtype="bfloat16")
    assert_same(params, jax.tree.map(lambda x: x.astype("bfloat16"), saved[2, "actor"]))


def test_what_is_not_there(run, tmp_path, capsys, monkeypatch):
    folder, _ = run

    def message(*arguments: str) -> str:
        assert convert_main([*arguments, str(tmp_path / "out")]) == 2
        return capsys.readouterr().err

    assert "no checkpoint of step 7; there are 1, 2" in message(f"{folder}@7")
    assert "is not a run directory" in message(f"{tmp_path}@7")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((folder / "config.json").read_text())
    assert f"{empty}/checkpoints: no checkpoint" in message(str(empty))
    (empty / "config.json").write_text('{"config": ')
    assert "not valid JSON" in message(str(empty))
    monkeypatch.setattr(ppo, "TRAINS", ("actor",))
    assert "ppo trains no critic" in message(str(folder), "--role", "critic")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_something_else(run, tmp_path, capsys):
    """Its config names a model of other sizes than the checkpoint has."""
    folder, _ = run
    other = tmp_path / "other"
    other.mkdir()
    (other / "checkpoints").symlink_to(folder / "checkpoints")
    values = json.loads((folder / "config.json").read_text())
    values["config"]["model"]["init"]["mlp"] = 128
    (other / "config.json").write_text(json.dumps(values))
    assert convert_main([str(other), str(tmp_path / "out")]) == 2
    assert "holds the arrays of another model" in capsys.readouterr().err
