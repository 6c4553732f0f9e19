"""Tiny jobs of the offline loop: the configs' own ``:tiny`` variants, changed by a test."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import pytest

from yatt_jax.config import OfflineRun, parse
from yatt_jax.controller.offline import train
from yatt_jax.controller.offline_job import OfflineJob
from yatt_jax.controller.offline_plan import OfflinePlan, make_offline_plan

# Adam divides by the gradient's size: a large rate would show rounding in entries whose gradient is near 0.
STEADY: dict[str, Any] = {"optimizer__lr": 1e-3, "optimizer__schedule": "constant"}


def config(name: str, variant: str = "tiny", **changes: Any) -> OfflineRun:
    """A config; ``changes`` are dotted keys with ``__`` for the dots."""
    made = importlib.import_module(f"configs.{name}").get_config(variant).unlock()
    made.compilation_cache = ""
    for key, value in changes.items():
        *parents, last = key.split("__")
        place = made
        for parent in parents:
            place = place[parent]
        place[last] = value
    parsed = parse(made)
    assert isinstance(parsed, OfflineRun)
    return parsed


def plan(name: str, devices: int = 1, variant: str = "tiny", **changes: Any) -> OfflinePlan:
    """The plan of such a config on so many devices."""
    some = jax.devices()[:devices]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda: some)
        return make_offline_plan(config(name, variant, **changes))


def run(folder: Path, name: str, devices: int = 1, variant: str = "tiny", **changes: Any) -> Any:
    """Runs a job in ``folder`` to its end, and returns its final states."""
    with OfflineJob(plan(name, devices, variant, **changes), folder) as job:
        train(job)
        return jax.device_get(job.states)
