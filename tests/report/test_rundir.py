"""The run directory: whole lines, valid JSON, cut back to a step, clear errors."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from yatt_jax.errors import InputError
from yatt_jax.report.rundir import RunDir, RunDirError, log_files, read_log, replace_text, to_json


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def test_creates_the_folder_and_leaves_no_probe(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "a" / "b")
    assert run.path.is_dir()
    assert list(run.path.iterdir()) == []
    assert run.last_step() is None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: p / "file", "is a file: name a folder"),
        (lambda p: p / "file" / "below", "a part of this path is a file"),
        (lambda p: "", "--workdir is empty"),
        (lambda p: "gs://bucket/run", "a local or mounted folder"),
    ],
)
def test_a_path_that_cannot_be_a_folder(tmp_path: Path, make, expected: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunDirError, match=expected) as caught:
        RunDir.open(make(tmp_path))
    assert isinstance(caught.value, InputError)


def test_a_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(RunDirError, match=r"not writable \(Permission denied\): change its permissions"):
        RunDir.open(tmp_path)


def test_append_writes_valid_json_whatever_the_values(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    run.append(
        "metrics",
        {
            "step": np.int64(3),
            "a": math.nan,
            "b": np.float32(-math.inf),
            "c": np.array([1.5, np.nan]),
            "d": {"e": (1, Path("x"))},
            "f": np.bool_(True),
            "g": "half of \ud83d, a \x00 and an é\n",
        },
    )
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not JSON")) == {
        "step": 3,
        "a": None,
        "b": None,
        "c": [1.5, None],
        "d": {"e": [1, "x"]},
        "f": True,
        "g": "half of \ud83d, a \x00 and an é\n",
    }


def test_a_record_needs_its_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs its step"):
        RunDir.open(tmp_path).append("samples", {"completion": "x"})


def test_lines_are_out_at_once_and_never_mixed(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)

    def work(worker: int) -> None:
        for i in range(50):
            run.append("samples", {"step": i, "worker": worker, "text": "x" * 5000})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = [json.loads(line) for line in lines(tmp_path / "samples.jsonl")]  # not closed, nothing flushed
    assert len(records) == 200
    assert {r["worker"] for r in records} == {0, 1, 2, 3}


def test_each_process_has_its_own_files(tmp_path: Path) -> None:
    for process in (0, 2, 11):
        run = RunDir.open(tmp_path, process, 12)
        run.append("samples", {"step": 1})
        run.write_config({"a": 1}, {"process": process})
    assert [(p, f.name) for p, f in log_files(tmp_path, "samples")] == [
        (0, "samples.jsonl"),
        (2, "samples.2.jsonl"),
        (11, "samples.11.jsonl"),
    ]
    assert json.loads((tmp_path / "config.json").read_text()) == {"process": 0, "config": {"a": 1}}


def test_cut_back_drops_later_steps_and_a_half_written_line(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    for step in range(5):
        run.append("metrics", {"step": step})
        run.append("timeline", {"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "rollout/rew')
    run = RunDir.open(tmp_path)
    assert run.last_step() == 4
    run.cut_back(2)
    run.append("metrics", {"step": 3, "again": True})
    assert lines(tmp_path / "metrics.jsonl") == [
        '{"step": 0}',
        '{"step": 1}',
        '{"step": 2}',
        '{"step": 3, "again": true}',
    ]
    assert lines(tmp_path / "timeline.jsonl") == ['{"step": 0}', '{"step": 1}', '{"step": 2}']
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "timeline.jsonl"]


def test_cut_back_while_files_are_open(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    for step in (1, 2):
        run.append("metrics", {"step": step})
    run.cut_back(-1)
    run.append("metrics", {"step": 1, "new": 1})
    assert lines(tmp_path / "metrics.jsonl") == ['{"step": 1, "new": 1}']


def test_cut_back_with_fewer_processes_reaches_the_files_of_those_that_are_gone(tmp_path: Path) -> None:
    for process in range(4):
        run = RunDir.open(tmp_path, process, 4)
        for step in (1, 2):
            run.append("samples", {"step": step, "process": process})
    for process in range(2):
        RunDir.open(tmp_path, process, 2).cut_back(1)
    left = {p: [r["step"] for r in read_log(f)] for p, f in log_files(tmp_path, "samples")}
    assert left == {0: [1], 1: [1], 2: [1], 3: [1]}


@pytest.mark.parametrize(
    ("tail", "expected"),
    [('{"step": 2, "a"', ["1", "3"]), ('{"step": 2}', ["1", "2", "3"]), ("\x00\x00\x00", ["1", "3"])],
)
def test_appending_after_a_crash_mends_the_last_line(tmp_path: Path, tail: str, expected: list[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + tail)
    RunDir.open(tmp_path).append("metrics", {"step": 3})
    assert lines(tmp_path / "metrics.jsonl") == [f'{{"step": {step}}}' for step in expected]


def test_reading_passes_over_what_is_not_a_record(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n\n[1]\n{"no": 1}\n{"step": "x"}\n\xff\xfe\n{"step": 2}\n{"step":')
    assert [r["step"] for r in read_log(file)] == [1, 2]
    assert list(read_log(tmp_path / "absent")) == []


def test_reading_the_end_of_a_log_starts_at_a_whole_line(tmp_path: Path) -> None:
    file = tmp_path / "timeline.1.jsonl"
    file.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 10)))  # 12 bytes each
    for last, first in ((12, 9), (13, 9), (23, 9), (24, 8), (25, 8), (108, 1), (109, 1), (10_000, 1)):
        assert next(r["step"] for r in read_log(file, last)) == first, last


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    run = RunDir.open(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunDirError, match=r"metrics\.jsonl: the disk is full \([\d.]+ MiB free\): free some space"):
        run.append("metrics", {"step": 1})


def test_a_line_that_only_fits_in_part_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.open(tmp_path)
    run.append("metrics", {"step": 1})
    write, calls = os.write, []

    def short(handle: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data[:5])

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(RunDirError, match="disk is full"):
        run.append("metrics", {"step": 2})
    assert len(calls) == 2
    assert lines(tmp_path / "metrics.jsonl") == ['{"step": 1}']


def test_replace_text_keeps_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.html"
    replace_text(file, "old")

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RunDirError, match="disk is full"):
        replace_text(file, "new")
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_to_json_of_a_dataclass_is_its_fields() -> None:
    from yatt_jax.parallel.partition import Split

    assert to_json({"split": Split(data=2)}) == {"split": {"data": 2, "fsdp": 1, "tensor": 1}}


def test_a_second_run_is_kept_out_while_the_first_lives(tmp_path: Path) -> None:
    first = RunDir.open(tmp_path)
    first.take()
    second = RunDir.open(tmp_path)
    with pytest.raises(RunDirError, match=r"another run writes here \(process \d+ on "):
        second.take()
    RunDir.open(tmp_path, 1, 2).take()  # only the first process of a job takes the folder
    first.close()
    second.take()
    second.close()
