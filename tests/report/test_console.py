"""The console: exact plain lines, and a live view that nothing tears."""

from __future__ import annotations

import io
import logging
import math
import sys

import pytest

from yatt_jax.report import console as consoles
from yatt_jax.report.console import PlainConsole, open_console
from yatt_jax.report.live import LiveConsole
from yatt_jax.report.metrics import ConsoleSink
from yatt_jax.report.text import counted, duration, headlines, listed, number, one_line, sparkline

METRICS = {
    "rollout/reward": 0.4312,
    "rollout/kl_k1": 0.5,
    "rollout/kl_k3": 0.01234,
    "train/actor/entropy": 1.5,
    "eval/response_length": 9.0,
    "rollout/response_length": 21.75,
    "time/step": 18.24,
}
RECORDS = [
    {
        "asked": None,
        "prompt": f"p{i}\nq",
        "completion": f"c{i} [b]x",
        "total": t,
        "advantage": a,
        "finish": "stop",
        "length": 3,
    }
    for i, (t, a) in enumerate([(0.5, 0.1), (None, None), (-1.0, -0.25)])
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.43123, "0.431"),
        (1.0, "1"),
        (21.75, "21.75"),
        (123456.0, "123,456"),
        (1e-5, "1.00e-5"),
        (0.0, "0"),
        (-2.5e7, "-2.50e7"),
        (math.nan, "-"),
        (None, "-"),
        (-math.inf, "-∞"),
    ],
)
def test_number(value: float | None, expected: str) -> None:
    assert number(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.123, "0.12 s"),
        (18.24, "18.2 s"),
        (99.97, "1 min 40 s"),
        (200, "3 min 20 s"),
        (3599.9, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (math.nan, "-"),
    ],
)
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_headlines_prefer_the_usual_names() -> None:
    assert headlines(METRICS) == [("reward", 0.4312), ("kl", 0.01234), ("entropy", 1.5), ("length", 21.75)]
    assert headlines({"eval/reward": 0.2}) == [("held-out", 0.2)]
    assert headlines({**METRICS, "eval/reward": 0.2})[:2] == [("reward", 0.4312), ("held-out", 0.2)]
    assert headlines({**METRICS, "train/actor/loss": 3.0})[0] == ("reward", 0.4312)
    # Without rewards, the loss.
    losses = {"train/reward/loss": 0.5, "train/reward/accuracy": 0.75, "eval/loss": 0.6}
    assert headlines(losses) == [("loss", 0.5), ("held-out", 0.6), ("accuracy", 0.75)]


def test_sparkline_and_one_line() -> None:
    assert sparkline([0, 1, math.nan, 0.5]) == "▁█ ▅"
    assert sparkline([2, 2]) == "▁▁"
    assert sparkline([math.nan]) == ""
    assert one_line(" a\n b  c ", 20) == "a b c"
    assert one_line("abcdef", 4) == "abc…"


def test_things_are_listed_and_counted() -> None:
    assert listed("process", [3]) == "process 3"
    assert listed("process", [5, 0, 2, 1, 8, 7, 2]) == "processes 0 to 2, 5, 7, 8"
    assert (counted(1, "device"), counted(1024, "process")) == ("1 device", "1,024 processes")


def test_plain_lines() -> None:
    out = io.StringIO()
    with open_console(stream=out) as console:
        assert isinstance(console, PlainConsole)
        sink = ConsoleSink(console, 100)
        sink.write(0, {"eval/reward": 0.25})
        sink.write(12, METRICS)
        console.message("hello")
        console.warning("careful")
        console.samples(RECORDS, "samples of step 12", 2)
        sink.write(100, METRICS | {"time/step": 0.5})
        sink.close()
    assert out.getvalue().splitlines() == [
        "step 0/100  held-out 0.250",
        "step 12/100  reward 0.431  kl 0.012  entropy 1.5  length 21.75  18.2 s  eta 26 min 45 s",
        "hello",
        "warning: careful",
        "samples of step 12",
        "  reward 0.500  advantage 0.100  stop, 3 tokens",
        "    p0 q",
        "    -> c0 [b]x",
        "  reward -  stop, 3 tokens",
        "    p1 q",
        "    -> c1 [b]x",
        "step 100/100  reward 0.431  kl 0.012  entropy 1.5  length 21.75  0.50 s",
    ]


def test_time_left_follows_recent_steps_and_not_the_first() -> None:
    eta = consoles.Eta()
    assert all(math.isnan(value) for value in eta.step(0, 10))
    assert eta.step(1, 10, took=60.0) == (60.0, 540.0)
    assert eta.step(2, 10, took=2.0) == (2.0, 16.0)
    assert eta.step(2, 10, took=9.0) == (2.0, 16.0)  # the evaluation after the same step
    assert eta.step(3, 10, took=4.0) == (4.0, 21.0)


def test_plain_phases_are_announced_once_and_bars_only_when_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = io.StringIO(), iter(range(0, 1000, 4))
    monkeypatch.setattr(consoles.time, "monotonic", lambda: float(next(clock)))
    console = PlainConsole(out)
    for _ in range(2):
        with console.phase("rollout"):
            pass
    with console.progress("sampling", 6) as advance:
        for _ in range(6):
            advance(1)
    assert out.getvalue().splitlines() == ["rollout ...", "rollout: 4.0 s", "sampling 4/6  16.0 s"]


def test_other_processes_show_their_warnings_only() -> None:
    for process, quiet, mark in ((3, False, "[process 3] "), (3, True, "[process 3] "), (0, True, "")):
        out = Terminal()
        console = open_console(process, out, quiet=quiet)
        with console, console.phase("load"), console.progress("sampling", 2) as advance:
            advance(1)
            console.step(1, 2, METRICS)
            console.message("report: there")
            console.samples(RECORDS, "samples")
            console.warning("disk nearly full")
        assert out.getvalue() == f"{mark}warning: disk nearly full\n"


def test_live_view_shows_steps_and_messages() -> None:
    out = Terminal()
    with open_console(stream=out) as console:
        assert isinstance(console, LiveConsole)
        with console.phase("load [model]"), console.progress("sampling", 4) as advance:
            advance(2)
        console.step(1, 2, METRICS)
        console.message("[bold]not markup[/bold]")
        console.warning("[red]careful")
        console.samples(RECORDS, "samples [x]")
        console.samples([], "nothing")
    text = out.getvalue()
    for expected in (
        "step 1/2",
        "0.431",
        "[bold]not markup[/bold]",
        "warning: [red]careful",
        "samples [x]",
        "c0 [b]x",
        "rollout",
        "1/2",
    ):
        assert expected in text
    assert "nothing" not in text


def test_live_panels_group_metrics_by_what_they_belong_to() -> None:
    out = Terminal()
    with LiveConsole(out) as console:
        console.step(
            1, 3, {"train/actor/loss": 1.0, "train/critic/loss": 2.0, "time/rollout/decode": 4.0, "loose": 3.0}
        )
    view = out.getvalue()
    for expected in ("train/actor", "train/critic", "rollout/decode", "loose", "4.0 s"):
        assert expected in view


def test_log_lines_do_not_tear_the_live_view_and_handlers_are_given_back() -> None:
    out, before = Terminal(), sys.stderr
    logger, handler = logging.getLogger("test-live"), logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    try:
        with open_console(stream=out) as console, console.progress("sampling", 2):
            assert handler.stream is sys.stderr is not before
            logger.warning("careful [now]")
            print("printed")
        assert handler.stream is before is sys.stderr
    finally:
        logger.removeHandler(handler)
    assert "careful [now]\n" in out.getvalue()
    assert "printed\n" in out.getvalue()


def test_an_error_leaves_no_bar_behind() -> None:
    console = LiveConsole(Terminal())
    with pytest.raises(ZeroDivisionError), console, console.phase("a"), console.progress("b", 3):
        _ = 1 / 0
    assert console._bars.tasks == []
