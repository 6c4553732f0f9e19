"""The sample log, and which rows are shown."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from yatt_jax.errors import InputError
from yatt_jax.report.rundir import RunDir
from yatt_jax.report.samples import SampleLog, pairs, pick, short
from yatt_jax.types import MediaItem, Prompt, Sample


def sample(index: int, completion: str = "ok", messages: list | None = None) -> Sample:
    prompt = Prompt(messages or [], f"<user>question {index}", [1, 2], {"answer": 1}, "f:1", index)
    return Sample(prompt, completion, [5, 6, 7], "stop", 100 + index, index // 2)


def test_a_record_holds_what_a_reader_needs(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    chat = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "image"}, {"text": "what?"}]},
    ]
    (returned,) = SampleLog(run).write(
        3,
        "train",
        [sample(1, "a <b>", chat)],
        np.array([np.nan], np.float32),
        {"vader": np.array([0.1], np.float32), "judge": np.array([np.nan])},
        np.array([-0.7], np.float32),
    )
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 3,
        "split": "train",
        "sample_id": 101,
        "group": 0,
        "prompt_index": 1,
        "prompt": "<user>question 1",
        "asked": "[image] what?",
        "completion": "a <b>",
        "total": None,
        "rewards": {"vader": 0.1, "judge": None},
        "advantage": -0.7,
        "finish": "stop",
        "length": 3,
    }
    assert math.isnan(returned["total"])


def test_training_rows_are_limited_and_held_out_ones_are_not(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    log, rows, zeros = SampleLog(run, train_rows=2), [sample(i) for i in range(5)], np.zeros(5)
    assert len(log.write(1, "train", rows, zeros, {})) == 2
    held_out = log.write(1, "eval", rows, zeros, {})
    assert [r["advantage"] for r in held_out] == [None] * 5
    with pytest.raises(ValueError, match=r"rewards\['x'\] has 4 values for 5 samples"):
        log.write(1, "train", rows, zeros, {"x": np.zeros(4)})
    with pytest.raises(ValueError, match="train_rows = -1"):
        SampleLog(run, -1)


def test_processes_share_the_rows_that_are_kept(tmp_path: Path) -> None:
    rows, zeros = [sample(i) for i in range(8)], np.zeros(8)
    kept = [
        len(SampleLog(RunDir.open(tmp_path, process, 4), train_rows=10).write(1, "train", rows, zeros, {}))
        for process in range(4)
    ]
    assert kept == [3, 3, 3, 3]  # rounded up: a process that exists says something


def test_short_is_the_shortest_decimal_of_a_float32() -> None:
    assert short(np.float32(0.1)) == 0.1
    assert short(1e-5) == 1e-5
    assert math.isnan(short(math.nan))


def test_pick_shows_the_spread() -> None:
    rows = [{"total": t} for t in (0.1, None, 0.9, 0.5, -0.3, 0.7)]
    assert [r["total"] for r in pick(rows, 6)] == [0.9, 0.7, 0.5, 0.1, -0.3, None]
    assert [r["total"] for r in pick(rows, 3)] == [0.9, 0.5, None]
    assert math.isnan(pick([{"total": math.nan}, {"total": -5.0}], 2)[1]["total"])
    assert [r["total"] for r in pick(rows[:1], 4)] == [0.1]
    assert pick(rows, 0) == []
    assert pick([], 3) == []


def test_pairs_join_the_first_and_the_last_evaluation_by_prompt() -> None:
    def row(step: int, index: int, text: str, sample_id: int = 0) -> dict:
        return {
            "step": step,
            "split": "eval",
            "prompt_index": index,
            "prompt": f"p{index}",
            "completion": text,
            "sample_id": sample_id,
        }

    rows = [
        row(0, 1, "one before"),
        row(0, 0, "zero before, second", 9),
        row(0, 0, "zero before, first", 4),
        row(5, 0, "between"),
        row(9, 2, "two after"),
        row(9, 0, "zero after, first", 4),
        row(9, 0, "zero after, second", 9),
        {**row(12, 0, "training"), "split": "train"},
    ]
    assert [(a["completion"], b["completion"]) for a, b in pairs(rows)] == [
        ("zero before, first", "zero after, first"),
        ("zero before, second", "zero after, second"),
    ]
    assert pairs(rows[:2]) == []
    assert pairs([]) == []


def item(digest: str, kind: str = "image", mime: str = "image/png", calls: list | None = None) -> MediaItem:
    def preview() -> tuple[str, bytes]:
        if calls is not None:
            calls.append(digest)
        if mime == "gone":
            raise InputError("no such file")
        return mime, digest.encode()

    return MediaItem(kind, (1, 1, 1), 1, 0.0, digest, lambda: np.zeros((1, 1)), preview)  # type: ignore[arg-type]


def with_media(index: int, *media: MediaItem) -> Sample:
    made = sample(index)
    return dataclasses.replace(made, prompt=dataclasses.replace(made.prompt, media=media))


def test_copies_of_media_are_kept_once(tmp_path: Path) -> None:
    run, zeros, calls = RunDir.open(tmp_path), np.zeros(3), []
    log = SampleLog(run)
    picture, talk, gone = item("a1", calls=calls), item("b2", "audio", "audio/flac", calls), item("c3", mime="gone")
    rows = [with_media(0, picture, talk), with_media(1, picture), with_media(2, gone)]
    records = log.write(0, "eval", rows, zeros, {})
    assert [record.get("media") for record in records] == [
        [{"kind": "image", "file": "media/a1.png"}, {"kind": "audio", "file": "media/b2.flac"}],
        [{"kind": "image", "file": "media/a1.png"}],
        [{"kind": "image"}],
    ]
    assert (tmp_path / "media" / "b2.flac").read_bytes() == b"b2"
    log.write(5, "eval", rows, zeros, {})
    assert calls == ["a1", "b2"]
    assert "media" not in log.write(5, "eval", [sample(4)], zeros[:1], {})[0]


def test_of_training_media_the_last_step_is_kept(tmp_path: Path) -> None:
    log, zeros = SampleLog(RunDir.open(tmp_path, 1, 2)), np.zeros(2)
    log.write(0, "eval", [with_media(0, item("e0")), with_media(1, item("e1"))], zeros, {})
    for step in range(3):
        rows = [with_media(0, item(f"{step}a")), with_media(1, item("e1"))]
        log.write(step, "train", rows, zeros, {})
    assert sorted(p.name for p in (tmp_path / "media.1").iterdir()) == ["2a.png", "e0.png", "e1.png"]
