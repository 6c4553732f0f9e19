"""Files that grow batch by batch: a command that ends anywhere goes on, and nothing is lost or repeated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from yatt_jax.errors import InputError
from yatt_jax.synth.output import Output

SETTINGS: dict[str, Any] = {"model": "m", "lengths": (1, 2)}
WHOLE = '{"n": 0}\n{"n": 1}\n{"n": 2}\n{"n": 3}\n'


class Killed(Exception):
    """Stands for the end of the process."""


def work(path: Path, settings: Any = SETTINGS, **more: Any) -> Output:
    """Two lines of each of two batches; goes on where it is."""
    output = Output(path, settings, **more)
    while not output.whole and output.done < 4:
        output.add([{"n": output.done + i} for i in range(2)], 2, {"written": 2})
    output.finish()
    return output


def test_it_is_there_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    output = Output(path, SETTINGS)
    output.add([{"n": 0}, {"n": 1}], 2, {"written": 2})
    assert not path.exists()
    again = work(path)
    assert path.read_text() == WHOLE
    assert again.counts == {"written": 4}
    assert sorted(p.name for p in path.parent.iterdir()) == ["rows.jsonl", "rows.jsonl.made"]


def test_one_that_is_whole_is_not_made_again(tmp_path: Path) -> None:
    work(tmp_path / "rows.jsonl")
    output = Output(tmp_path / "rows.jsonl", SETTINGS)
    assert (output.whole, output.done, output.counts["written"]) == (True, 4, 4)
    output.finish()
    assert (tmp_path / "rows.jsonl").read_text() == WHOLE


@pytest.mark.parametrize("call", range(11))
def test_a_process_may_end_before_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    path, calls = tmp_path / "rows.jsonl", [0]

    def ends(function: Any) -> Any:
        def wrapped(*args: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] > call:
                raise Killed
            return function(*args, **named)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", ends(os.replace))
        patch.setattr(os, "fsync", ends(os.fsync))  # lines are written, and not yet noted
        patch.setattr(Path, "write_text", ends(Path.write_text))
        try:
            work(path)
            assert call >= 9
        except Killed:
            assert call < 9
    assert work(path).counts == {"written": 4}
    assert path.read_text() == WHOLE


def test_another_source_of_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Output(path, SETTINGS).add([{"n": 7}], 1)
    with pytest.raises(InputError, match=r'begun with other settings:\n  config.model: "m" -> "other"'):
        work(path, SETTINGS | {"model": "other"})
    work(path, SETTINGS | {"model": "other"}, overwrite=True)
    assert path.read_text() == WHOLE


def test_what_was_not_made_here_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists, and was not made here"):
        work(path)
    assert path.read_text() == "mine"


def test_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Output(path, SETTINGS).add([{"n": 0}], 1)
    (tmp_path / "rows.jsonl.partial").write_text("")
    with pytest.raises(InputError, match="9 bytes were written and 0 are there"):
        work(path)
    (tmp_path / "rows.jsonl.made").write_text("{")
    with pytest.raises(InputError, match=r"rows\.jsonl\.made: damaged"):
        work(path)
