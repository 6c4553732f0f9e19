"""The timeline picture and the table of waiting, as they come out on the page."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.report.process_runs import make_run, put
from yatt_jax.report.html import page
from yatt_jax.report.lanes import Lane, View, choose, lanes, view
from yatt_jax.report.picture import timeline_picture
from yatt_jax.report.read import Phase, Run, read_run
from yatt_jax.report.rundir import RunDir, RunDirError
from yatt_jax.report.waits import measure

SVG = "{http://www.w3.org/2000/svg}"
COLOURS = {"rollout": 0, "train": 1}


def shown(run: Run) -> View:
    found = view(run, measure(run))
    assert found is not None
    return found


def drawn(run: Run) -> ET.Element:
    return ET.fromstring(lanes(shown(run), COLOURS))


def place(mark: ET.Element) -> tuple[float, float, float]:
    """Left, right and top edge."""
    x, width = float(mark.attrib["x"]), float(mark.attrib["width"])
    return x, x + width, float(mark.attrib["y"])


def words(text: str) -> str:
    """What a reader sees of a page."""
    bare = re.sub(r"<(style|script)>.*?</\1>|<title>.*?</title>|<[^>]*>", " ", text, flags=re.DOTALL)
    return " ".join(html.unescape(bare).split())


def test_processes_are_side_by_side_and_nested_phases_below() -> None:
    first = [Phase(0, 1, "rollout", 100.0, 104.0, "end"), Phase(0, 1, "rollout/decode", 101.0, 103.0, "end")]
    second = [Phase(1, 1, "rollout", 101.0, 110.0, "open"), Phase(1, 1, "<train>", 110.0, 110.0, "error")]
    view = View([Lane(0, "process 0", "", first), Lane(1, "process 1", "a", second)], [1], [])
    svg = ET.fromstring(lanes(view, {"rollout": 0}))
    rects = svg.findall("rect")
    assert [r.attrib["class"] for r in rects] == ["depth0 end", "depth1 end", "depth0 open", "depth0 error"]
    places = [place(rect) for rect in rects]
    assert places[0][2] < places[1][2] < places[2][2]
    assert places[0][1] - places[0][0] == pytest.approx(2 * (places[1][1] - places[1][0]), abs=0.1)
    assert places[2][0] > places[0][0]
    assert rects[3].findtext("title") == "process 1, step 1: <train> 0.00 s, ended by an error"
    assert [t.text for t in svg.findall("text") if (t.text or "").startswith(("process", "a"))] == [
        "process 0",
        "process 1",
        "a",
    ]


def test_waits_are_hatched_within_their_phase(tmp_path: Path) -> None:
    svg = drawn(read_run(make_run(tmp_path, [2.0, 6.0], steps=1)))
    outer = [rect for rect in svg.findall("rect") if rect.attrib["class"] == "depth0 end"]
    waits = svg.findall("g")
    bars = {rect.findtext("title"): place(rect) for rect in outer}
    notes = {wait.findtext("title"): wait for wait in waits}
    left, right, top = bars["process 0, step 1: rollout 6.0 s"]
    wait = notes["process 0, step 1: waited for the others, rollout, 4.0 s"]
    (backing,) = wait.findall("rect")
    start, end, level = place(backing)
    assert level == top
    assert (start - left) / (right - left) == pytest.approx(1 / 3, abs=0.01)
    assert end == pytest.approx(right, abs=0.02)
    assert len(wait.findall("line")) == 1
    # Nothing is hatched where nobody waited.
    assert notes["process 1, step 1: waited for the others, rollout, 0.00 s"].findall("line") == []


def test_lanes_are_labelled_by_process_and_place(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, [1.0, 2.0, 1.5], devices=[4, 4, 1]))
    texts = [text.text for text in drawn(run).findall("text")]
    for expected in ("process 0", "host-0 · 4 devices", "process 2", "host-1 · 1 device", "step 1", "step 3"):
        assert expected in texts


@pytest.mark.parametrize("waits", [True, False])
def test_lanes_of_skewed_clocks_are_moved_together(tmp_path: Path, waits: bool) -> None:
    make_run(tmp_path, [2.0, 6.0, 4.0], skew={1: 3.5, 2: -40.0})
    if not waits:  # then steps are taken to start together
        for file in tmp_path.iterdir():
            file.write_text("".join(line for line in file.read_text().splitlines(True) if "/wait" not in line))
    found = shown(read_run(tmp_path))
    ends = [[p.end for p in lane.phases if p.name == "rollout"] for lane in found.lanes]
    assert ends[0] == pytest.approx([1006.0, 1016.0, 1026.0])
    assert ends[1] == pytest.approx(ends[0])
    assert ends[2] == pytest.approx(ends[0])
    (note,) = found.notes
    assert note.startswith(
        "Clocks differ from that of process 0: those of processes 1, 2, most by 40.0 s (process 2). The lanes are moved"
    )
    assert shown(read_run(make_run(tmp_path / "even", [2.0, 6.0], skew={1: 0.05}))).notes == []


def test_a_killed_process_stays_in_its_phase(tmp_path: Path) -> None:
    make_run(tmp_path, [2.0, 3.0], steps=1)
    for process in (0, 1):
        run = RunDir.open(tmp_path, process, 2)
        put(run, 2, "rollout", 1007.0, None if process else 1067.0, "error")
        if process:  # never heard of again
            put(run, 2, "rollout/sample", 1008.0, None)
        else:
            put(run, 2, "rollout/wait", 1008.0, 1067.0, "error")
    svg = drawn(read_run(tmp_path))
    rects = {(rect.findtext("title") or ""): rect for rect in svg.findall("rect")}
    killed = next(rect for title, rect in rects.items() if title.endswith("rollout 1.0 s, never ended"))
    failed = next(rect for title, rect in rects.items() if title.endswith("rollout 60.0 s, ended by an error"))
    assert killed.attrib["class"] == "depth0 open"
    assert place(killed)[1] == pytest.approx(place(failed)[1], abs=0.1)
    assert any((wait.findtext("title") or "").endswith("rollout, 59.0 s, in vain") for wait in svg.findall("g"))


def test_what_came_before_a_stop_is_not_drawn(tmp_path: Path) -> None:
    make_run(tmp_path, [2.0, 3.0], steps=2)
    for process in (0, 1):
        put(RunDir.open(tmp_path, process, 2), 3, "rollout", 90_000.0, 90_005.0)
    assert shown(read_run(tmp_path)).steps == [3]


def test_choice_of_lanes() -> None:
    assert choose({3: 0.1, 1: 0.5}) == {1: "", 3: ""}
    marks = choose({process: process / 512 for process in range(512)})
    assert list(marks) == [0, 1, 2, 3, 4, 76, 148, 220, 291, 363, 435, 507, 508, 509, 510, 511]
    assert [process for process, mark in marks.items() if mark == "slow"] == [0, 1, 2, 3]
    assert [process for process, mark in marks.items() if mark == "fast"] == [508, 509, 510, 511]


def test_many_processes_stay_readable(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, [1 + p / 63 for p in range(64)], steps=5))
    found = shown(run)
    assert len(found.lanes) == 16
    assert found.steps == [2, 3, 4, 5]
    assert found.notes == [
        "16 of 64 processes: the 4 that waited least (slow: the others wait for them), the 4 that waited most (fast), "
        "and 8 spread evenly over the rest."
    ]
    assert [lane.label for lane in found.lanes if "slow" in lane.label][-1] == "process 63, slow"
    text = page([run])
    assert len(text) < 250_000
    seen = words(text)
    assert "process 0, fast" in seen
    assert "Devices waited 8.3% of their time for other processes. They waited most for process 63" in seen
    assert "mean of 256 devices 2.5 s 8.3%" in seen
    assert "32 hosts, 256 devices: host-0 (processes 0, 1), host-1" in seen
    assert "host-15 (processes 30, 31), and 16 more" in seen


def test_table_of_waiting(tmp_path: Path) -> None:
    text = page([read_run(make_run(tmp_path, [2.0, 6.0], train_waits={1: 1.0}, devices=[1, 3]))])
    seen = words(text)
    for expected in (
        "Timeline of steps 1 to 3",
        "waiting for the others",
        "Steps 1 to 3. Devices waited 17.5% of their time for other processes. They waited most for process 1: 12.0 s "
        "each on average, 80% of the waiting for whoever came last.",
        "process 0 host-0 · 1 device 12.0 s 40.0% rollout, 100% 3.0 s",
        "process 1 host-0 · 3 devices 3.0 s 10.0% train, 100% 12.0 s",
        "mean of 4 devices 5.2 s 17.5%",
        "Totals and seconds of each step are those of process 0.",
        "rollout 18.0 s 60% 3 6.0 s",
        "hosts 1 host, 4 devices: host-0 (processes 0, 1)",
    ):
        assert expected in seen, expected
    assert text.count('<tr class="worst">') == 1
    assert '<i style="width:40.00%;background:var(--c0)" title="rollout: 12.0 s"></i>' in text


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_pages_of_few_processes(tmp_path: Path, processes: int) -> None:
    seen = words(page([read_run(make_run(tmp_path, [1.0 + p for p in range(processes)]))]))
    assert seen.count("Share of time waited") == (processes > 1)
    # Once in the picture and once in the table.
    assert [seen.count(f"process {p} host") for p in range(processes)] == [2 if processes > 1 else 1] * processes


def test_no_waits_and_no_introductions(tmp_path: Path) -> None:
    for process in (0, 1):
        put(RunDir.open(tmp_path, process, 2), 1, "rollout", 10.0, 20.0)
    seen = words(page([read_run(tmp_path)]))
    assert "No process wrote down that it waited for another." in seen
    assert "hosts" not in seen


def test_time_of_several_phases_together_is_no_phase(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    times = {"time/rollout": 4.0, "time/rollout/repartition": 1.0, "time/repartition": 1.0, "time/step": 5.0}
    run.append("metrics", {"step": 1, **times})
    seen = words(page([read_run(tmp_path)]))
    assert "Seconds of each step rollout between phases" in seen


def test_the_picture_is_a_file_of_its_own(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, [2.0, 6.0, 4.0], skew={2: 3.0}))
    svg = timeline_picture(run)
    root = ET.fromstring(svg)
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    for expected in ("Timeline of steps 1 to 3", "process 2", "waiting for the others", "rollout", "train"):
        assert expected in texts
    assert any(text.startswith("Devices waited 20.0% of their time") for text in texts)
    assert any(text.startswith("Clocks differ") for text in texts)
    assert "prefers-color-scheme:dark" in svg
    height = float(root.attrib["height"])
    assert all(float(element.attrib["y"]) < height for element in root.iter(f"{SVG}text"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(RunDirError, match="no phase in timeline"):
        timeline_picture(read_run(tmp_path / "empty"))


def test_text_of_a_timeline_cannot_become_markup(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script>'
    for process in (0, 1):
        run = RunDir.open(tmp_path, process, 2)
        about = {
            "event": "process",
            "time": 1.0,
            "host": evil,
            "devices": [evil],
            "versions": {evil: f"{evil}{process}"},
        }
        run.append("timeline", {"step": 0, "phase": None, "processes": 2, **about})
        put(run, 1, evil, 1.0, 2.0)
        put(run, 1, f"{evil}/wait", 1.0, 1.5 + process / 4)
    text = page([read_run(tmp_path)])
    assert text.count("<script>") == 1
    assert "<script>alert" not in timeline_picture(read_run(tmp_path))
