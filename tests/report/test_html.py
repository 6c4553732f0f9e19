"""The page: made from whatever a run left, self-contained, and safe with any text in it."""

from __future__ import annotations

import html.parser
import importlib
import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from yatt_jax.report import facts
from yatt_jax.report.charts import Line
from yatt_jax.report.html import headline_change, page, write
from yatt_jax.report.picture import curves, picture
from yatt_jax.report.read import Run, read_run
from yatt_jax.report.rundir import RunDir, RunDirError
from yatt_jax.report.samples import SampleLog
from yatt_jax.report.times import wall_seconds
from yatt_jax.types import MediaItem, Prompt, Sample

ATTACK = "</script></style><script>alert(1)</script><img src=x onerror=alert(2)>\" ' &amp; </textarea>"
VOID = {"meta", "img", "br", "hr", "input", "link"}


class Reader(html.parser.HTMLParser):
    """Collects tags, attributes and text, and checks that every tag is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def make_run(folder: Path, steps: int = 3, text: str = "fine", evaluate: bool = True, processes: int = 1) -> RunDir:
    for process in reversed(range(processes)):
        run = RunDir.open(folder, process, processes)
        log = SampleLog(run)
        run.write_config({"algo": "ppo", "steps": steps, "note": text}, facts.gather({"actor": 1234567}, [text]))
        now = 1000.0
        for step in range(steps + 1):
            rows = [
                Sample(Prompt([], f"{text} {i}", [1], {}, "", i), f"{text} {step}", [1], "length", i, i) for i in (0, 1)
            ]
            if evaluate and step in (0, steps):
                log.write(step, "eval", rows, np.array([0.1, 0.2]) + step, {text: np.zeros(2), "b": np.ones(2)})
                if process == 0:
                    run.append("metrics", {"step": step, "eval/reward": 0.15 + step, "eval/reward_ci95": 0.1})
            if step == 0:
                continue
            for phase, seconds in (("rollout", 2.0), ("rollout/decode", 1.0), ("train", 4.0)):
                start = now if "/" not in phase else now - 1.5
                run.append("timeline", {"step": step, "phase": phase, "event": "start", "time": start})
                run.append("timeline", {"step": step, "phase": phase, "event": "end", "time": start + seconds})
                now += seconds if "/" not in phase else 0.0
            log.write(step, "train", rows, np.array([step, np.nan]), {text: np.zeros(2), "b": np.ones(2)}, np.ones(2))
            if process == 0:
                metrics = {
                    "rollout/reward": 0.1 * step,
                    "rollout/kl_k3": 0.01 * step,
                    "train/actor/loss": math.nan if step == 2 else 1.0,
                    f"train/{text}": 1.0,
                    "time/rollout": 2.0,
                    "time/rollout/decode": 1.0,
                    "time/train": 4.0,
                    "time/step": 6.5,
                }
                run.append("metrics", {"step": step, **metrics})
        run.close()
    return RunDir.open(folder, 0, processes)


def test_a_full_run(tmp_path: Path) -> None:
    made = write(make_run(tmp_path / "first"))
    read = Reader(made.read_text())
    for expected in (
        "first",
        "Held-out reward 0.150 → 3.15 +3",
        "KL to the reference 0.030",
        "Steps 3",
        "Duration 18.0 s",
        "1,234,567",
        "fine 0",
        "Of 2 answers logged at both steps, 2 score higher after training and 0 lower.",
        "rollout 6.0 s 33%",
        "train 12.0 s 67%",
        "between phases",
        "process 0",
    ):
        assert expected in read.words, expected
    charts = [attrs for tag, attrs in read.tags if tag == "svg"]
    assert len(charts) >= 5
    first = json.loads(charts[0]["data-tips"] or "")
    assert [(line["n"], len(line["p"])) for line in first["lines"]] == [("training", 3), ("held-out", 2)]


def test_the_page_asks_nothing_of_the_network(tmp_path: Path) -> None:
    text = write(make_run(tmp_path, text="plain")).read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|<link|<iframe|\bsrc=", text)
    assert "default-src 'none'" in text


def test_text_from_models_and_files_cannot_become_markup(tmp_path: Path) -> None:
    text = write(make_run(tmp_path / "<b>run", text=ATTACK)).read_text()
    read = Reader(text)
    assert [tag for tag, _ in read.tags].count("script") == 1
    assert not {"img", "b", "textarea"} & {tag for tag, _ in read.tags}
    assert not [name for _, attrs in read.tags for name in attrs if name.startswith("on")]
    assert ATTACK in read.words
    assert "<b>run" in read.words


def test_unprintable_text_is_made_visible(tmp_path: Path) -> None:
    text = write(make_run(tmp_path, text="a\x00b\u202ec\ud800d")).read_text()
    assert "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c" in text
    assert "\u202e" not in Reader(text).words.split("Config")[0]


def test_one_step_without_evaluation(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, steps=1, evaluate=False).path)
    words = Reader(page([run])).words
    assert "Training reward 0.100 → 0.100 +0" in words
    assert "Before and after" not in words


def test_change_of_training_reward_is_between_tenths(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    for step in range(1, 21):
        run.append("metrics", {"step": step, "rollout/reward": float(step)})
    assert headline_change(read_run(tmp_path)) == ("training reward", 1.5, 19.5)


def test_a_run_without_rewards_is_judged_by_its_loss(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    for step in range(3):
        losses = {"train/reward/loss": 3.0 - step, "eval/loss": 2.0 - 0.5 * step, "eval/loss_ci95": 0.1}
        run.append("metrics", {"step": step, **losses, "eval/accuracy": 0.5 + 0.1 * step})
    text = page([read_run(tmp_path)])
    words = Reader(text).words
    for expected in ("Held-out loss 2 → 1 -1", "Loss held-out, 95 % interval training", "Accuracy"):
        assert expected in words, expected
    assert '<span class="up">-1</span>' in text
    assert "eval/loss_ci95" not in words
    assert headline_change(read_run(tmp_path)) == ("held-out loss", 2.0, 1.0)


def test_one_evaluation_only_is_shown_as_such(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    rows = [Sample(Prompt([], "why?", [1], {}, "", 0), "because", [1], "stop", 0, 0)]
    SampleLog(run).write(0, "eval", rows, np.array([1.0]), {"r": np.array([1.0])})
    words = Reader(page([read_run(tmp_path)])).words
    assert "Held-out prompts were answered once, at step 0. why? reward 1 because" in words


def test_media_are_shown_and_played(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    copies = {"image": ("image/webp", b"picture"), "audio": ("audio/flac", b"talk")}
    items = tuple(
        MediaItem(kind, (1, 1, 1), 1, 0.0, f"{i}f", lambda: np.zeros((1, 1)), lambda kind=kind: copies[kind])  # type: ignore[arg-type]
        for i, kind in enumerate(copies)
    )
    rows = [Sample(Prompt([], "why?", [1], {}, "", i, items), "because", [1], "stop", i, i) for i in range(2)]
    log = SampleLog(run)
    for step in (0, 1):
        log.write(step, "eval", rows, np.zeros(2), {"r": np.zeros(2)})
        log.write(step, "train", rows, np.zeros(2), {"r": np.zeros(2)})
    text = page([read_run(tmp_path)])
    Reader(text)
    image = '<img alt="image" src="data:image/webp;base64,cGljdHVyZQ==">'
    audio = '<audio controls preload="none" src="data:audio/flac;base64,dGFsaw=="></audio>'
    assert text.count(f'<div class="media">{image}{audio}</div>') == 4  # two pairs, and two rows of the table
    # What is gone, or named so that it leads elsewhere, is named by its kind.
    (tmp_path / "media" / "0f.webp").unlink()
    (tmp_path / "secret.png").write_bytes(b"secret")
    with (tmp_path / "samples.jsonl").open("a") as file:
        for entry in ('{"kind": "<b>", "file": "media/../secret.png"}', '{"kind": 7, "file": 7}', "[]"):
            record = {"step": 2, "split": "train", "completion": "x", "media": "MEDIA"}
            file.write(json.dumps(record).replace('"MEDIA"', f"[{entry}]") + "\n")
    text = page([read_run(tmp_path)])
    Reader(text)
    assert text.count(f'<div class="media"><span class="soft small">[image]</span>{audio}</div>') == 2
    assert '<span class="soft small">[&lt;b&gt;]</span>' in text
    assert "c2VjcmV0" not in text


@pytest.mark.parametrize("content", [{}, {"config.json": "{"}, {"metrics.jsonl": '{"step": 1, "a/b": null}\n{"st'}])
def test_almost_nothing_is_still_a_page(tmp_path: Path, content: dict[str, str]) -> None:
    run = RunDir.open(tmp_path)
    for name, text in ({"config.json": "{}"} | content).items():
        (tmp_path / name).write_text(text)
    Reader(write(run).read_text())


def test_strange_records_are_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for log, record in (
        ("metrics", '{"step": 1, "rollout/reward": "high", "x/y": [1], "z/z": true}'),
        ("metrics", '{"step": 2, "train/actor/loss": NaN, "rollout/kl_k3": 1e999}'),
        ("samples", '{"step": 99, "completion": 5}'),
        ("samples", '{"step": 98, "split": "train", "completion": "bare"}'),
        ("timeline", '{"step": 3, "phase": 7, "event": "start", "time": 1}'),
        ("timeline", '{"step": 3, "phase": "train", "event": "end", "time": "now"}'),
        ("timeline", '{"step": 3, "phase": "never started", "event": "end", "time": 5}'),
    ):
        with (tmp_path / f"{log}.jsonl").open("a") as file:
            file.write(record + "\n")
    read = read_run(run.path)
    assert read.values("rollout/reward")[0] == pytest.approx(0.1)
    assert {"x/y", "z/z"}.isdisjoint(read.names())
    assert read.points("rollout/kl_k3")[1] == (2, None)
    assert [record["completion"] for record in read.last] == ["bare"]
    Reader(page([read]))


def test_phases_of_a_killed_process_end_with_its_last_sign_of_life(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    for phase, event, moment in (
        ("load", "start", 0.0),
        ("load", "end", 10.0),
        ("rollout", "start", 10.0),
        ("rollout/decode", "start", 12.0),  # killed here, resumed much later
        ("load", "start", 5000.0),
        ("load", "end", 5010.0),
    ):
        run.append("timeline", {"step": 1, "phase": phase, "event": event, "time": moment})
    found = read_run(tmp_path)
    open_ones = {p.name: (p.start, p.end) for p in found.phases if p.state == "open"}
    assert open_ones == {"rollout": (10.0, 12.0), "rollout/decode": (12.0, 12.0)}
    assert wall_seconds(found) == 22.0  # not the hours until somebody started it again


def test_pauses_between_stop_and_resume_do_not_count(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    for start, end in ((0.0, 10.0), (12.0, 20.0), (5000.0, 5010.0)):
        run.append("timeline", {"step": 1, "phase": "train", "event": "start", "time": start})
        run.append("timeline", {"step": 1, "phase": "train", "event": "end", "time": end})
    assert wall_seconds(read_run(tmp_path)) == 30.0


def test_processes_are_merged_and_shown_side_by_side(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, processes=3).path)
    assert {phase.process for phase in run.phases} == {0, 1, 2}
    assert len(run.last) == 6
    words = Reader(page([run])).words
    assert "process 2" in words
    assert "rollout 6.0 s 33%" in words  # of one process, not of all three


def test_thousands_of_steps_make_a_small_page(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(5000):
            values = {f"train/m{i}": math.sin(step / 50 + i) for i in range(5)} | {"rollout/reward": step / 5000}
            file.write(json.dumps({"step": step, **values, "time/train": 1.0, "time/step": 1.0}) + "\n")
    text = write(run).read_text()
    assert len(text) < 400_000
    Reader(text)


def test_several_runs_are_overlaid(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name, steps=steps).path) for name, steps in (("seed1", 3), ("seed<2>", 5))]
    read = Reader(page(runs))
    assert "seed1, seed<2>" in read.words
    assert "seed1 held-out reward 0.150 3.15 +3 0.030 3 18.0 s" in read.words
    assert "seed<2> held-out reward 0.150 5.15 +5 0.050 5 30.0 s" in read.words
    first = json.loads(next(attrs["data-tips"] for tag, attrs in read.tags if tag == "svg") or "")
    assert {line["n"] for line in first["lines"]} == {
        "seed1: training",
        "seed1: held-out",
        "seed<2>: training",
        "seed<2>: held-out",
    }


def test_picture_is_a_file_of_its_own(tmp_path: Path) -> None:
    runs: list[Run] = [read_run(make_run(tmp_path / name).path) for name in ("a", "b&c")]
    svg = picture(runs, "PPO <first>")
    root = ET.fromstring(svg)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "PPO <first>" in texts
    assert "b&c: held-out" in texts
    assert "prefers-color-scheme:dark" in svg
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(RunDirError, match="no reward"):
        picture([read_run(tmp_path / "empty")], "x")


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    """The command, from the folder that it is run in."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return importlib.import_module("tools.report").main


def test_command(tmp_path: Path, main, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name)
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    assert main([first]) == 0
    assert (tmp_path / "a" / "report.html").exists()
    assert main([first, "--timeline", str(tmp_path / "t.svg")]) == 0
    ET.parse(tmp_path / "t.svg")
    with pytest.raises(SystemExit):
        main([first, second, "--timeline", str(tmp_path / "t.svg")])
    assert main([first, second, "--svg", str(tmp_path / "run.svg"), "--title", "Reward"]) == 0
    assert (tmp_path / "report.html").exists()
    ET.parse(tmp_path / "run.svg")
    captured = capsys.readouterr()
    assert "--timeline draws one run, and 2 are named" in captured.err
    assert captured.out.splitlines() == [
        f"{tmp_path}/a/report.html",
        f"{tmp_path}/a/report.html",
        f"{tmp_path}/t.svg",
        f"{tmp_path}/report.html",
        f"{tmp_path}/run.svg",
    ]


def test_command_with_a_folder_that_is_no_run(tmp_path: Path, main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent")]) == 2
    assert main([str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].endswith("absent: no such folder; name a run directory, the --workdir of a run")
    assert errors[1].endswith("is not a run directory: it has no metrics.jsonl")


def test_facts_name_versions_devices_and_the_command() -> None:
    found: dict[str, Any] = facts.gather({"actor": 5}, ["/anywhere/yatt_jax/main.py", "--config=a b.py"])
    assert found["command"] == "python -m yatt_jax.main '--config=a b.py'"
    assert found["parameters"] == {"actor": 5}
    assert found["devices"]["platform"] == "cpu"
    assert (found["devices"]["processes"], found["devices"]["per_process"]) == (1, [8])
    assert {"python", "jax", "flax"} <= set(found["versions"])


def test_lines_as_a_picture_of_their_own() -> None:
    svg = curves([Line("a <b", [(1, 2.0), (2, 3.0)], 0), Line("c", [(1, 1.0)], 1)], "Times & shares")
    assert ET.fromstring(svg).tag.endswith("svg")
    assert "a &lt;b" in svg
    assert "Times &amp; shares" in svg
    with pytest.raises(ValueError, match="shares: no line has a number"):
        curves([Line("a", [(1, None)], 0)], "shares")
