"""A run's checkpoint is served as its export is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.controller import offline_tiny
from yatt_jax.errors import InputError

pytestmark = pytest.mark.slow


def test_a_run_and_its_export_give_the_same_rewards(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from yatt_jax.serve.config import BatchConfig, LimitsConfig, ServeConfig
    from yatt_jax.serve.load import make_service
    from yatt_jax.serve.measures import Measures

    offline_tiny.run(tmp_path / "run", "reward_model", devices=8, checkpoint__every_steps=1, checkpoint__keep=3)
    rows = [np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)]

    def rewards(path: Path | str) -> list[float]:
        small = {"batch": BatchConfig(rows=8), "limits": LimitsConfig(tokens=32)}
        service = make_service(ServeConfig(path=str(path), **small), "reward", Measures())
        return [float(of[-1, 0]) for of in service._batcher._run(rows)]  # type: ignore[attr-defined]

    run = tmp_path / "run"
    np.testing.assert_allclose(rewards(run), rewards(run / "export"), rtol=1e-5)
    assert not np.allclose(rewards(f"{run}@1"), rewards(run), rtol=1e-3)
    with pytest.raises(InputError, match="positions"):
        make_service(ServeConfig(path=str(run), limits=LimitsConfig(tokens=100_000)), "reward", Measures())
    with pytest.raises(InputError, match="trains no critic"):
        make_service(ServeConfig(path=str(run)), "critic", Measures())
