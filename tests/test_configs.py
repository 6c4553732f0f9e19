"""Every config parses, and its ``:tiny`` variant is small and needs no model file."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from yatt_jax.config import parse
from yatt_jax.controller.plan import make_plan

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(p.stem for p in (ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_says_how_to_run_it_and_parses(name: str) -> None:
    module = importlib.import_module(f"configs.{name}")
    for word in ("Command:", "Hardware:", f"configs/{name}.py"):
        assert word in (module.__doc__ or ""), word
    config = module.get_config()
    assert config.is_locked
    parse(config)
    with pytest.raises(ValueError, match="no variant 'nonsense'"):
        module.get_config("nonsense")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tiny_variant_plans(name: str) -> None:
    config = importlib.import_module(f"configs.{name}").get_config("tiny").unlock()
    config.parallel.train.data = 8
    if "rollout" in config.parallel:
        config.parallel.rollout.data = 8
    plan = make_plan(parse(config))
    assert plan.config.steps == 3
    assert all(model.parameter_count < 1e6 for model in plan.models.values())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_tiny_variant_runs_as_several_processes(tmp_path: Path, name: str, processes: int) -> None:
    command = ["launch/local.sh", str(processes), f"--config=configs/{name}.py:tiny", f"--workdir={tmp_path}/run"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHON": sys.executable, "GRACE": "20"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert (tmp_path / "run" / f"timeline.{processes - 1}.jsonl").exists()
    assert (tmp_path / "run" / "export" / "config.json").exists()
