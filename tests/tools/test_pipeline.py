"""Pipelines: stages in order, and on from where one stopped."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from tools.pipeline import main, outcome
from yatt_jax.config import parse

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "configs" / "pipeline").glob("*.py"))

# A pipeline of three commands, each of which appends to a file; the second one fails, or waits, while a file is there.
PIPELINE = """
def get_stages(folder, variant=""):
    if variant not in ("", "other"):
        raise ValueError(f"no variant {variant!r}")
    def stage(name):
        more = ["--twice"] if variant == "other" and name == "two" else []
        return ["pipeline_stage", folder, name, *more]
    return {name: stage(name) for name in ("one", "two", "three")}
"""
STAGE = """
import os, pathlib, signal, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / name).mkdir(parents=True, exist_ok=True)
with open(folder / "log", "a") as file:
    file.write(name + "\\n")
def told(*_):
    (folder / "wait").unlink()
    sys.exit(75)
if name == "two":
    signal.signal(signal.SIGTERM, told)
    while (folder / "wait").exists():
        (folder / "ready").touch()
        time.sleep(0.01)
    if (folder / "fail").exists():
        sys.exit(3)
"""


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of the pipeline."""
    (tmp_path / "three.py").write_text(PIPELINE)
    (tmp_path / "pipeline_stage.py").write_text(STAGE.replace("\\\\", "\\"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return str(tmp_path / "three.py")


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().split()


def test_stages_run_in_order_and_once(pipeline: str, tmp_path: Path, capsys: Any) -> None:
    assert main([pipeline, f"--workdir={tmp_path}/p"]) == 0
    assert log(tmp_path / "p") == ["one", "two", "three"]
    assert main([pipeline, f"--workdir={tmp_path}/p"]) == 0
    assert log(tmp_path / "p") == ["one", "two", "three"]
    assert "stage 3 of 3, three: done" in capsys.readouterr().out


def test_a_stage_that_fails_is_where_it_goes_on(pipeline: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "fail").touch()
    assert main([pipeline, f"--workdir={tmp_path}/p"]) == 3
    assert "stage two ended with status 3; the same command goes on with it" in capsys.readouterr().err
    (tmp_path / "p" / "fail").unlink()
    assert main([pipeline, f"--workdir={tmp_path}/p"]) == 0
    assert log(tmp_path / "p") == ["one", "two", "two", "three"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stage_that_is_told_to_stop_saves(pipeline: str, tmp_path: Path, number: int) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "wait").touch()
    command = [sys.executable, "-m", "tools.pipeline", pipeline, f"--workdir={folder}"]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (folder / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "stage two was told to stop; the same command goes on with it" in said
    assert main([pipeline, f"--workdir={folder}"]) == 0
    assert log(folder) == ["one", "two", "two", "three"]


def test_other_settings_are_told_and_run_anew_on_demand(pipeline: str, tmp_path: Path, capsys: Any) -> None:
    assert main([pipeline, f"--workdir={tmp_path}/p"]) == 0
    held = json.loads((tmp_path / "p" / "pipeline.json").read_text())
    (tmp_path / "p" / "pipeline.json").write_text(json.dumps(held | {"pipeline": f"{pipeline}:other"}))
    assert main([f"{pipeline}:other", f"--workdir={tmp_path}/p"]) == 2
    said = capsys.readouterr().err
    assert "stage two was done with other settings" in said
    assert "--again=two runs it and what follows anew" in said
    (tmp_path / "p" / "two" / "left").touch()
    assert main([f"{pipeline}:other", f"--workdir={tmp_path}/p", "--again=two"]) == 0
    assert log(tmp_path / "p") == ["one", "two", "three", "two", "three"]
    assert not (tmp_path / "p" / "two" / "left").exists()


def test_a_dry_run_runs_and_removes_nothing(pipeline: str, tmp_path: Path, capsys: Any) -> None:
    assert main([pipeline, f"--workdir={tmp_path}/p", "--dry_run"]) == 0
    assert "-m pipeline_stage" in capsys.readouterr().out
    assert not (tmp_path / "p").exists()
    assert main([pipeline, f"--workdir={tmp_path}/p"]) == 0
    assert main([pipeline, f"--workdir={tmp_path}/p", "--dry_run", "--again=one"]) == 0
    assert f"would discard {tmp_path}/p/one" in capsys.readouterr().out
    assert (tmp_path / "p" / "one").exists()
    assert len(json.loads((tmp_path / "p" / "pipeline.json").read_text())["done"]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "nowhere.py: no such pipeline"),
        (["configs/pipeline/rlfh.py"], "did you mean 'configs/pipeline/rlhf.py'?"),
        (["configs/sft.py"], "AttributeError"),
        (["configs/pipeline/rlhf.py:huge"], "sft has no variant 'huge'"),
        (["configs/pipeline/rlhf.py", "--again=pppo"], "no such stage (did you mean 'ppo'?)"),
        (["configs/pipeline/rlhf.py", "--set=ppp.steps=3"], "expected STAGE.KEY=VALUE (did you mean 'ppo'?)"),
        (["configs/pipeline/steerlm.py", "--set=annotate.steps=3"], "annotate is a command and has no config"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, capsys: Any, words: list[str], message: str) -> None:
    assert main([*words, f"--workdir={tmp_path}/p"]) == 2
    assert message in capsys.readouterr().err


def test_another_pipeline_needs_another_folder(pipeline: str, tmp_path: Path, capsys: Any) -> None:
    assert main([pipeline, f"--workdir={tmp_path}/p"]) == 0
    assert main(["configs/pipeline/rlhf.py", f"--workdir={tmp_path}/p"]) == 2
    assert f"holds the pipeline {pipeline}" in capsys.readouterr().err
    (tmp_path / "p" / "pipeline.json").write_text("{")
    assert main([pipeline, f"--workdir={tmp_path}/p"]) == 2
    assert "pipeline.json: damaged" in capsys.readouterr().err


def test_settings_and_launchers_reach_the_commands(tmp_path: Path, capsys: Any) -> None:
    words = ["configs/pipeline/rlhf.py:tiny", f"--workdir={tmp_path}/p", "--dry_run", "--launch=launch/local.sh 2"]
    assert main([*words, "--set=ppo.steps=7", "--set=ppo.hyper.kl.coef=0.5"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "ppo:" in line]
    assert "launch/local.sh 2 --config=configs/pipeline/rlhf.py:ppo,tiny,in=" in line
    assert line.endswith("--config.steps=7 --config.hyper.kl.coef=0.5")


def test_what_came_of_a_run_is_told(tmp_path: Path) -> None:
    rows = [{"step": 0, "eval/loss": 2.0, "eval/error_3": None, "eval/loss_ci95": 0.1}, {"step": 1}, {"eval/loss": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert outcome(tmp_path) == [f"  {tmp_path.name}: eval/loss 2 -> 0.5"]
    assert outcome(tmp_path / "nothing") == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_stage_has_a_config_of_its_own(file: Path) -> None:
    module = importlib.import_module(f"configs.pipeline.{file.stem}")
    assert f"configs/pipeline/{file.stem}.py" in str(module.__doc__)
    for variant in ("", "small", "tiny"):
        stages = module.get_stages("runs/here", variant)
        for name, what in stages.items():
            if isinstance(what, ConfigDict):
                config = module.get_config(",".join([name, *([variant] if variant else []), "in=runs/here"]))
                assert config.is_locked
                assert parse(config) == parse(what)
    with pytest.raises(ValueError, match="no stage 'nonsense'"):
        module.get_config("nonsense")
    with pytest.raises(ValueError, match="expected STAGE"):
        module.get_config("sft,tiny,small")


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_tiny_pipeline_runs(tmp_path: Path, file: Path) -> None:
    words = [sys.executable, "-m", "tools.pipeline", f"configs/pipeline/{file.stem}.py:tiny", f"--workdir={tmp_path}/p"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all stages are done" in done.stdout
    last = list(json.loads((tmp_path / "p" / "pipeline.json").read_text())["done"])[-1]
    assert (tmp_path / "p" / last / "export" / "config.json").exists()
