"""Computes the geometry of charts: the positions of lines, bands, ticks and labels. The report draws them as SVG."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Optional

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 34
MOST_POINTS = 240
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line to draw.

    Attributes:
        label: its text in the legend.
        colour: its colour class.
        points: its (step, value) points.
        faint: whether the line is thin and pale, and not in the legend.
        spread: half the height of the band around each point; None without a band.
    """

    label: str
    colour: str
    points: Sequence[Point]
    faint: bool = False
    spread: Optional[Sequence[float]] = None


@dataclass(frozen=True)
class Mark:
    """A single measured point with its interval. `label` names the point, `legend` the kind of point."""

    label: str
    legend: str
    colour: str
    x: float
    y: float
    interval: Optional[Sequence[float]] = None


@dataclass(frozen=True)
class Drawing:
    """A chart, in SVG units of a WIDTH × HEIGHT view.

    Attributes:
        x_ticks, y_ticks: (position, text).
        paths: (colour, kind, path data); kind is "line", "faint", "area" or "stack".
        marks: (colour, x, y, y of the interval's low end, y of its high end, text).
        hovers: (left, width, text) of strips that show the values under the pointer.
        legend, mark_legend: (colour, text) of the lines and of the marks.
        x: the name of the horizontal axis.
    """

    title: str
    note: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    paths: list[tuple[str, str, str]]
    marks: list[tuple[str, float, float, float, float, str]] = field(default_factory=list)
    hovers: list[tuple[float, float, str]] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)
    mark_legend: list[tuple[str, str]] = field(default_factory=list)
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM
    width: int = WIDTH
    height: int = HEIGHT
    x: str = "step"


Scale = Callable[[float], float]
"""Maps a value to its position."""


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    """Map values linearly from `low`…`high` to positions from `start` to `end`."""
    span = (high - low) or 1.0
    return lambda value: round(start + (value - low) / span * (end - start), 2)


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Return about `wanted` round numbers, 1, 2 or 5 × 10ⁿ apart, that cover `low` to `high`."""
    span = (high - low) or abs(high) or 1.0
    min_step = span / max(1, wanted - 1)
    magnitude = 10 ** math.floor(math.log10(min_step))
    # the tolerances absorb rounding errors of the divisions, which would add or skip a tick
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= min_step * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def smooth(points: Sequence[Point], window: Optional[int] = None) -> list[Point]:
    """Compute a centred running mean, by default over about a tenth of the points; shorter windows at both ends."""
    half = (window if window is not None else max(1, len(points) // 10)) // 2
    values = [value for _, value in points]
    return [(x, fmean(values[max(0, index - half) : index + half + 1])) for index, (x, _) in enumerate(points)]


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most `most` points: a longer series is replaced by the means of equally long chunks."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in chunk), fmean(y for _, y in chunk)) for chunk in chunks]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    y_range: Optional[Point] = None,
    marks: Sequence[Mark] = (),
    x: str = "step",
) -> Drawing:
    """Draw lines over steps, or what `x` says. Without `y_range` the y axis begins at 0, or at the lowest value if that
    is negative."""
    xs = [x for line in series for x, _ in line.points] + [mark.x for mark in marks]
    ys = [y for line in series for _, y in line.points] + [mark.y for mark in marks]
    low, high = y_range or (min(0.0, *ys), max(ys))
    y_values = ticks(low, high)
    x_scale, y_scale = _scales(min(xs), max(xs), y_values)
    paths = []
    for line in series:
        if line.spread is not None:
            paths.append((line.colour, "area", _band(line, x_scale, y_scale, y_values)))
    for line in series:
        positions = [(x_scale(x), y_scale(y)) for x, y in thin(line.points)]
        paths.append((line.colour, "faint" if line.faint else "line", _path(positions)))
    return Drawing(
        title=title,
        note=note,
        x_ticks=_x_ticks(min(xs), max(xs), x_scale),
        y_ticks=[(y_scale(value), f"{value:g}".replace("e-0", "e-")) for value in y_values],
        paths=paths,
        marks=[_draw_mark(mark, x_scale, y_scale) for mark in marks],
        hovers=_hovers(series, x_scale),
        legend=[(line.colour, line.label) for line in series if not line.faint],
        mark_legend=list(dict.fromkeys((mark.colour, mark.legend) for mark in marks)),
        x=x,
    )


def area_chart(title: str, series: Sequence[Series], *, note: str = "", unit: str = "") -> Drawing:
    """Stack series on each other, the first at the bottom. All series must have the same steps."""
    thinned = [thin(line.points) for line in series]
    steps = [x for x, _ in thinned[0]]
    floors, stacks = [0.0] * len(steps), []
    for points in thinned:
        tops = [floor + value for floor, (_, value) in zip(floors, points, strict=True)]
        stacks.append((floors, tops))
        floors = tops
    y_values = ticks(0.0, max(floors))
    x_scale, y_scale = _scales(steps[0], steps[-1], y_values)
    paths = []
    for line, (lower, upper) in zip(series, stacks, strict=True):
        outline = [*zip(steps, upper, strict=True), *zip(reversed(steps), reversed(lower), strict=True)]
        paths.append((line.colour, "stack", _path([(x_scale(x), y_scale(y)) for x, y in outline]) + "Z"))
    return Drawing(
        title=title,
        note=note,
        x_ticks=_x_ticks(steps[0], steps[-1], x_scale),
        y_ticks=[(y_scale(value), f"{value:g}{unit}") for value in y_values],
        paths=paths,
        hovers=_hovers(series, x_scale, unit),
        legend=[(line.colour, line.label) for line in series],
    )


def _scales(first: float, last: float, y_values: Sequence[float]) -> tuple[Scale, Scale]:
    vertical = _scale(y_values[0], y_values[-1], HEIGHT - _BOTTOM, _TOP)
    return _scale(first, last, _LEFT, WIDTH - _RIGHT), vertical


def _x_ticks(first: float, last: float, scale: Scale) -> list[tuple[float, str]]:
    values = [value for value in ticks(first, last, 6) if first <= value <= last and value == int(value)]
    return [(scale(value), f"{value:g}") for value in values or [first]]


def _path(positions: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in positions)


def _band(line: Series, x_scale: Scale, y_scale: Scale, y_values: Sequence[float]) -> str:
    """Return the outline of value ± spread as path data, cut off at the edges of the chart."""
    low, high = y_values[0], y_values[-1]
    steps = [x for x, _ in line.points]
    pairs = list(zip(line.points, line.spread, strict=True))
    upper = thin([(x, min(high, y + spread)) for (x, y), spread in pairs])
    lower = thin([(x, max(low, y - spread)) for (x, y), spread in pairs])
    return _path([(x_scale(x), y_scale(y)) for x, y in [*upper, *reversed(lower)]]) + "Z" if steps else ""


def _draw_mark(mark: Mark, x_scale: Scale, y_scale: Scale) -> tuple[str, float, float, float, float, str]:
    """Return a mark as in `Drawing.marks`."""
    low, high = mark.interval or (mark.y, mark.y)
    text = f"{mark.label}: {mark.y:.3f}" + (f" [{low:.3f}, {high:.3f}]" if mark.interval else "")
    return mark.colour, x_scale(mark.x), y_scale(mark.y), y_scale(low), y_scale(high), text


def _hovers(series: Sequence[Series], x_scale: Scale, unit: str = "") -> list[tuple[float, float, str]]:
    """Return a strip for each step that lists its values. If lines share a label, the first one is listed."""
    values: dict[float, dict[str, str]] = {}
    for line in series:
        for x, y in thin(line.points):
            values.setdefault(x, {}).setdefault(line.label, f"{line.label}: {y:.4g}{unit}")
    steps = sorted(values)
    edges = [x_scale(x) for x in steps]
    borders = [edges[0], *((a + b) / 2 for a, b in pairwise(edges)), edges[-1]]
    return [
        (round(left, 2), round(max(right - left, 1.0), 2), "\n".join([f"step {x:g}", *values[x].values()]))
        for x, (left, right) in zip(steps, pairwise(borders), strict=True)
    ]
