"""Stand-ins for the programs that launchers start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.fakes import Fake


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    """Stand-ins in a folder of this test. What a failed test leaves running is killed."""
    stand_ins = Fake(tmp_path)
    yield stand_ins
    stand_ins.clear()
