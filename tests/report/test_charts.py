"""Charts: ticks, thinning, averages and the SVG that comes out."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from yatt_jax.report.charts import SMOOTHED_FROM, Line, line_chart, moving_average, nice_ticks, stacked_bars, thin
from yatt_jax.report.read import Points


@pytest.mark.parametrize(
    ("low", "high", "count", "ticks", "digits"),
    [
        (0.0, 1.0, 4, [0.0, 0.25, 0.5, 0.75, 1.0], 2),
        (0.13, 0.77, 4, [0.2, 0.4, 0.6], 1),
        (-3.0, 12.0, 5, [0.0, 5.0, 10.0], 0),
        (0.99985, 1.00012, 3, [0.9999, 1.0, 1.0001], 4),
        (1000.0, 9000.0, 4, [2000.0, 4000.0, 6000.0, 8000.0], 0),
    ],
)
def test_nice_ticks(low: float, high: float, count: int, ticks: list[float], digits: int) -> None:
    found, places = nice_ticks(low, high, count)
    assert found == pytest.approx(ticks)
    assert places == digits


def test_steps_have_whole_ticks() -> None:
    assert nice_ticks(1, 3, 6, whole=True) == ([1.0, 2.0, 3.0], 0)
    assert nice_ticks(1, 16, 6, whole=True) == ([5.0, 10.0, 15.0], 0)


def test_thinning_keeps_extremes_ends_and_gaps() -> None:
    points: Points = [(i, float(i % 7)) for i in range(10_000)]
    points[4321] = (4321, 99.0)
    points[777] = (777, -99.0)
    few = thin(points, 400)
    assert len(few) <= 402
    assert few == sorted(few)
    assert {(4321, 99.0), (777, -99.0), points[0], points[-1]} <= set(few)
    gap = [(i, None if 3000 <= i < 5000 else 1.0) for i in range(10_000)]
    assert any(value is None for _, value in thin(gap, 400))
    assert thin(points[:5], 400) == points[:5]


def test_moving_average_is_unbiased_at_its_start() -> None:
    smooth = moving_average([(0, 4.0), (1, None), (2, 0.0), (3, 0.0)])
    # decay 1 - 1/2: (4), (4/2 + 0) / 1.5, (4/4 + 0) / 1.75
    assert smooth == [(0, 4.0), (2, pytest.approx(4 / 3)), (3, pytest.approx(4 / 7))]


def parse(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def test_a_line_breaks_where_there_is_no_data() -> None:
    svg = parse(
        line_chart([Line("a & <b>", [(0, 1.0), (1, 2.0), (2, None), (3, 4.0), (4, 5.0), (5, None), (6, 1.0)], 0)])
    )
    lines = svg.findall("polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 2]
    assert len(svg.findall("circle")) == 1  # the last value stands alone
    tips = json.loads(svg.attrib["data-tips"])
    assert tips["lines"][0] == {"n": "a & <b>", "c": 0, "p": [[0, "1"], [1, "2"], [3, "4"], [4, "5"], [6, "1"]]}


def test_higher_values_are_higher_up_and_stay_inside() -> None:
    svg = parse(line_chart([Line("a", [(10, -5.0), (20, 7.0)], 3)], 360, 190))
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in svg.findall("polyline")[0].attrib["points"].split())
    assert 46 <= x0 < x1 <= 348
    assert 10 <= y1 < y0 <= 164
    assert "var(--c3)" in svg.findall("polyline")[0].attrib["style"]


@pytest.mark.parametrize("value", [0.0, 5.0, -1e-12, 1e30])
def test_a_single_point_is_drawn(value: float) -> None:
    svg = parse(line_chart([Line("a", [(1, value)], 0)]))
    (dot,) = svg.findall("circle")
    assert 46 <= float(dot.attrib["cx"]) <= 348


def test_no_data_says_so() -> None:
    assert "no data" in line_chart([Line("a", [(1, None)], 0)])
    assert "no data" in line_chart([])


def test_many_points_are_smoothed_and_bounded() -> None:
    svg = line_chart([Line("a", [(i, float(i % 3)) for i in range(100_000)], 0)])
    assert len(svg) < 40_000
    assert [line.attrib["class"] for line in parse(svg).findall("polyline")] == ["line faint", "line solid"]


def test_band_of_uncertainty() -> None:
    line = Line("a", [(0, 1.0), (1, 2.0), (2, 3.0)], 0, margin={0: 0.5, 1: None, 2: 0.25})
    assert line.edges() == [(0, 0.5, 1.5), (2, 2.75, 3.25)]
    (band,) = parse(line_chart([line])).findall("polygon")
    assert len(band.attrib["points"].split()) == 4
    assert parse(line_chart([Line("a", [(0, 1.0), (1, 2.0)], 0)])).findall("polygon") == []


def test_bars_stack_to_the_whole_step() -> None:
    svg = parse(stacked_bars([1, 2], [("rollout", [3.0, 1.0], 0), ("train", [1.0, 3.0], 1)]))
    heights = [float(rect.attrib["height"]) for rect in svg.findall("rect")]
    assert heights[0] + heights[1] == pytest.approx(heights[2] + heights[3], abs=0.03)
    assert heights[0] == pytest.approx(3 * heights[1], abs=0.1)
    assert svg.findall("rect")[0].findtext("title") == "step 1: rollout 3.0 s"


def test_bars_of_many_steps_are_averaged() -> None:
    svg = parse(stacked_bars(list(range(1, 1001)), [("rollout", [2.0] * 1000, 0)]))
    bars = svg.findall("rect")
    assert 100 < len(bars) <= 150
    assert bars[0].findtext("title") == "steps 1 to 7: rollout 2.0 s"


def test_a_long_line_is_smoothed_unless_it_says_otherwise() -> None:
    points: list[tuple[int, float | None]] = [(i, float(i % 2)) for i in range(SMOOTHED_FROM + 1)]
    assert line_chart([Line("a", points, 0)]).count("<polyline") == 2
    assert line_chart([Line("a", points, 0, smoothed=False)]).count("<polyline") == 1
