"""The geometry of charts, worked out by hand."""

import pytest

from classroom_rl.results.charts import HEIGHT, Mark, Series, area_chart, line_chart, smooth, thin, ticks


def test_ticks_are_round_and_cover_the_values():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0, 3.4) == [0, 1, 2, 3, 4]
    assert ticks(0, 0)[0] == 0 and len(ticks(0, 0)) >= 2
    assert ticks(0, 3.1e-6, 4) == pytest.approx([0, 2e-6, 4e-6])


def test_smoothing_and_thinning_by_hand():
    points = [(1, 0.0), (2, 3.0), (3, 6.0), (4, 0.0)]
    assert smooth(points, 3) == [(1, 1.5), (2, 3.0), (3, 3.0), (4, 3.0)]
    assert smooth(points, 1) == points
    assert thin(points, 2) == [(1.5, 1.5), (3.5, 3.0)]
    assert thin(points, 4) == points


def test_lines_and_marks_stand_where_their_values_are():
    chart = line_chart(
        "x",
        [Series("a", "a", [(0, 0.0), (10, 1.0)])],
        y_range=(0, 1),
        marks=[Mark("m", "held out", "b", 10, 0.5, [0.25, 0.75])],
    )
    assert chart.paths == [("a", "line", f"M{chart.left:g},{chart.bottom:g}L{chart.right:g},{chart.top:g}")]
    colour, x, y, low, high, text = chart.marks[0]
    height = chart.bottom - chart.top
    assert (colour, x, text) == ("b", chart.right, "m: 0.500 [0.250, 0.750]")
    assert [y, low, high] == pytest.approx([chart.bottom - share * height for share in (0.5, 0.25, 0.75)], abs=0.01)
    assert chart.mark_legend == [("b", "held out")] and chart.legend == [("a", "a")]


def test_stacked_areas_stand_on_each_other():
    chart = area_chart("x", [Series("low", "a", [(1, 1.0), (2, 1.0)]), Series("high", "b", [(1, 3.0), (2, 3.0)])])
    middle = HEIGHT - 34 - (chart.bottom - chart.top) / 4
    assert f"{middle:g}" in chart.paths[0][2] and f"{middle:g}" in chart.paths[1][2]
    assert chart.hovers[0][2] == "step 1\nlow: 1\nhigh: 3"
    overlaid = line_chart("x", [Series("a", "a", [(1, 0.5)], faint=True), Series("a", "a", [(1, 0.7)])])
    assert [strip[2] for strip in overlaid.hovers] == ["step 1\na: 0.5"]
