"""Stand-ins for the programs that launchers start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.fakes import Fake


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """Stand-ins in a folder of this test; nothing of what they started is left at its end."""
    return Fake(tmp_path)
