"""Every config parses, and its ``:tiny`` variant is small and needs no model file."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from yatt_jax.config import parse
from yatt_jax.controller.plan import make_plan

CONFIGS = sorted(p.stem for p in (Path(__file__).parent.parent / "configs").glob("*.py"))


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
    config.parallel.rollout.data = 8
    plan = make_plan(parse(config))
    assert plan.config.steps == 3
    assert all(model.parameter_count < 1e6 for model in plan.models.values())
