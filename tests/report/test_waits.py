"""Waiting: golden shares, whom the others waited for, and clocks that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.process_runs import make_run, put
from yatt_jax.report import read
from yatt_jax.report.read import Phase, Run, read_run
from yatt_jax.report.rundir import RunDir
from yatt_jax.report.times import wall_seconds
from yatt_jax.report.waits import clocks, is_wait, measure, stretches


def test_names_of_waits() -> None:
    assert [
        name for name in ("wait", "a/wait", "a/b/wait", "a/wait/wait", "wait/a", "waiter", "a/wait/b") if is_wait(name)
    ] == [
        "wait",
        "a/wait",
        "a/b/wait",
    ]


def test_shares_of_two_processes(tmp_path: Path) -> None:
    waits = measure(read_run(make_run(tmp_path, [2.0, 6.0], train_waits={1: 1.0}, devices=[1, 3])))
    assert waits is not None
    assert (waits.first, waits.last) == (1, 3)
    first, second = waits.each
    # A step is 6 s of sampling and 4 s of training.
    assert (first.work, second.work) == (30.0, 30.0)
    assert first.phases == {"rollout": 12.0, "train": 0.0}
    assert second.phases == {"rollout": 0.0, "train": 3.0}
    assert (first.share, second.share) == (pytest.approx(0.4), pytest.approx(0.1))
    assert waits.share == pytest.approx((1 * 4 + 3 * 1) / 40)
    assert waits.phases == {"rollout": pytest.approx(12 / 4), "train": pytest.approx(3 * 3 / 4)}
    # Process 1 came last to sampling, and process 0 to the end of training.
    assert (first.held_up, second.held_up) == (pytest.approx(3.0), pytest.approx(12.0))
    slowest = waits.slowest()
    assert slowest is not None
    assert (slowest[0].process, slowest[1]) == (1, pytest.approx(0.8))


def test_shares_do_not_depend_on_clocks(tmp_path: Path) -> None:
    rollout = [3.0, 5.0, 4.0, 1.0]
    even = measure(read_run(make_run(tmp_path / "even", rollout)))
    skewed = measure(read_run(make_run(tmp_path / "skewed", rollout, skew={1: -3.25, 2: 7200.0, 3: 0.5})))
    assert even is not None
    assert skewed is not None
    # 5 + 4 s a step; waits of 2, 0, 1 and 4 s; the others wait 7 / 3 s a step for process 1.
    assert [one.share for one in even.each] == pytest.approx([2 / 9, 0, 1 / 9, 4 / 9])
    assert [one.share for one in skewed.each] == pytest.approx([2 / 9, 0, 1 / 9, 4 / 9])
    assert [one.held_up for one in skewed.each] == pytest.approx([0, 7, 0, 0])
    assert skewed.share == pytest.approx(7 / 36)


def test_one_process_waits_for_nobody(tmp_path: Path) -> None:
    waits = measure(read_run(make_run(tmp_path, [2.0])))
    assert waits is not None
    assert waits.share == 0.0
    assert waits.slowest() is None


def test_sixty_four_processes(tmp_path: Path) -> None:
    # Process p samples for 1 + p / 63 s, so it waits 1 - p / 63 of 6 s.
    waits = measure(read_run(make_run(tmp_path, [1 + p / 63 for p in range(64)])))
    assert waits is not None
    assert [one.share for one in waits.each] == pytest.approx([(1 - p / 63) / 6 for p in range(64)])
    assert waits.share == pytest.approx(0.5 / 6)
    slowest = waits.slowest()
    assert slowest is not None
    assert (slowest[0].process, slowest[1]) == (63, pytest.approx(1.0))


def test_a_process_that_did_not_say_its_devices_counts_as_most(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, [1.0, 1.0, 2.0], devices=[8, 8, 0]))
    waits = measure(run)
    assert waits is not None
    assert [one.devices for one in waits.each] == [8, 8, 8]
    alike = measure(read_run(make_run(tmp_path / "silent", [1.0, 2.0], introduce=False)))
    assert alike is not None
    assert [one.devices for one in alike.each] == [1, 1]


def test_clocks_are_compared_by_the_ends_of_waits(tmp_path: Path) -> None:
    skew = {1: -3.25, 2: 7200.0}
    run = read_run(make_run(tmp_path, [3.0, 5.0, 4.0], skew=skew))
    assert clocks(run.phases, [2, 3]) == pytest.approx({0: 0.0, **skew})


def test_clocks_without_waits_are_compared_by_the_start_of_steps(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, [3.0, 5.0], skew={1: 60.0}))
    bare = [phase for phase in run.phases if not is_wait(phase.name)]
    assert clocks(bare, [2, 3]) == pytest.approx({0: 0.0, 1: 60.0})
    only_first = [phase for phase in run.phases if phase.step == 1 or not is_wait(phase.name)]
    assert clocks(only_first, [3]) == pytest.approx({0: 0.0, 1: 60.0})  # by the waits of an earlier step


def test_a_wait_cut_short_is_no_measure_of_clocks_or_lateness(tmp_path: Path) -> None:
    make_run(tmp_path, [2.0, 3.0])
    for process, end in ((0, 500.0), (1, None)):
        put(RunDir.open(tmp_path, process, 2), 4, "rollout/wait", 1100.0, None if end is None else 1100 + end, "error")
    run = read_run(tmp_path)
    waits = measure(run)
    assert waits is not None
    assert waits.each[0].held_up == 0.0
    assert waits.each[1].held_up == pytest.approx(3.0)
    assert clocks(run.phases, [3, 4]) == pytest.approx({0: 0.0, 1: 0.0})


def test_work_leaves_out_pauses() -> None:
    phases = [
        Phase(0, 1, "a", start, end, "end") for start, end in ((0.0, 10.0), (2.0, 5.0), (69.0, 70.0), (131.0, 140.0))
    ]
    assert stretches(phases) == [(0.0, 70.0), (131.0, 140.0)]


def test_duration_is_by_one_clock(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, [3.0, 5.0], skew={1: 1e6}))
    assert wall_seconds(run) == 27.0


def test_long_timelines_are_read_from_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, [2.0, 6.0], steps=400)
    monkeypatch.setattr(read, "TIMELINE_BYTES", 0)
    monkeypatch.setattr(read, "_LEAST_BYTES", 20_000)
    run: Run = read_run(tmp_path)
    assert 300 < run.since < 400
    of_step: dict[tuple[int, int], int] = {}
    for phase in run.phases:
        of_step[phase.process, phase.step] = of_step.get((phase.process, phase.step), 0) + 1
    assert {of_step[process, step] for process in (0, 1) for step in range(run.since, 401)} == {5}
    assert min(phase.step for phase in run.phases if phase.process == 0) == 1
    assert run.places[1].host == "host-0"
    waits = measure(run)
    assert waits is not None
    assert waits.first == run.since
    assert waits.each[0].share == pytest.approx(0.4)


def test_a_restart_ends_what_the_introduction_finds_open(tmp_path: Path) -> None:
    place: dict[str, Any] = {"phase": None, "event": "process", "devices": ["cpu 0"], "versions": {}, "processes": 1}
    run = RunDir.open(tmp_path)
    run.append("timeline", {"step": 0, "time": 100.0, "host": "old", **place})
    put(run, 1, "rollout", 100.0, None)
    put(run, 1, "reward", 101.0, 103.0)  # a thread beside it, not a restart
    run.append("timeline", {"step": 1, "time": 50.0, "host": "new", **place})  # on a machine whose clock is behind
    put(run, 1, "rollout", 51.0, 55.0)
    put(run, 1, "train", 55.0, None)
    found = read_run(tmp_path)
    assert {(p.name, p.start): (p.end, p.state) for p in found.phases} == {
        ("rollout", 100.0): (103.0, "open"),
        ("reward", 101.0): (103.0, "end"),
        ("rollout", 51.0): (55.0, "end"),
        ("train", 55.0): (55.0, "open"),
    }
    assert found.places[0].host == "new"


def test_absent_unreadable_and_stale_timelines_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, [1.0, 2.0, 1.0, 1.0, 1.0], steps=6)
    for process in (2, 3):
        (tmp_path / f"timeline.{process}.jsonl").unlink()
    lines = (tmp_path / "timeline.4.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= 2]
    (tmp_path / "timeline.4.jsonl").write_text("".join(kept).replace("0.10.2", "0.10.1") + '{"step": 3, "phase": "rol')
    assert read_run(tmp_path).notes == [
        "No timeline of processes 2, 3 (of 5): it never got that far, or its --workdir is on another file system. "
        "Copy its files (timeline.2.jsonl, ...) here and make this page again.",
        "Process 4 wrote nothing after step 2; others went on to step 6.",
        "Processes run different versions of jax: 0.10.2 on processes 0, 1; 0.10.1 on process 4.",
    ]
    read_log = read.read_log

    def refuse(file: Path, last: int | None = None) -> Any:
        if file.name == "timeline.1.jsonl":
            raise PermissionError(13, "Permission denied")
        return read_log(file, last)

    monkeypatch.setattr(read, "read_log", refuse)
    notes = read_run(tmp_path).notes
    assert notes[0] == "timeline.1.jsonl cannot be read (Permission denied): what it holds is missing here."
    assert "No timeline of processes 1 to 3 (of 5)" in notes[1]


def test_the_folder_of_another_process_alone(tmp_path: Path) -> None:
    make_run(tmp_path / "all", [1.0, 2.0])
    (tmp_path / "own").mkdir()
    (tmp_path / "all" / "timeline.1.jsonl").rename(tmp_path / "own" / "timeline.1.jsonl")
    run = read_run(tmp_path / "own")
    assert run.processes == [1]
    assert run.notes[0].startswith("No timeline of process 0 (of 2)")
    assert wall_seconds(run) == 18.0


def test_metrics_are_those_of_process_0_and_samples_in_the_order_of_their_ids(tmp_path: Path) -> None:
    for process, ids in ((0, (5, 1)), (1, (4, 0)), (2, (3, 2))):
        run = RunDir.open(tmp_path, process, 3)
        run.append("metrics", {"step": 1, "rollout/reward": float(process)})
        for sample in ids:
            for split in ("train", "eval"):
                run.append("samples", {"step": 1, "split": split, "sample_id": sample, "completion": f"c{sample}"})
    found = read_run(tmp_path)
    assert found.values("rollout/reward") == [0.0]
    assert [record["sample_id"] for record in found.last] == [0, 1, 2, 3, 4, 5]
    assert [record["sample_id"] for record in found.held_out] == [0, 1, 2, 3, 4, 5]
