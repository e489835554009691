"""Line charts as inline SVG: one axis, thin grid, lines named at their ends, values shown on hover."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 540, 250
LEFT, RIGHT, TOP, BOTTOM = 52.0, 78.0, 14.0, 34.0
POINTS = 300  # of a line; longer series are averaged in bins


@dataclass(frozen=True)
class Series:
    """A line: its name, points, and colour as a CSS class (`c0`, `c1`, ...; `d0` ... `d7` for depths in order)."""

    name: str
    x: Sequence[float | int]
    y: Sequence[float | int]
    colour: str
    dots: bool = False


def line_chart(title: str, series: list[Series], x_label: str, y_from_zero: bool = False) -> str:
    """The chart as a <figure>; an empty string if there is nothing to draw."""
    drawn = [s for s in map(_thinned, series) if len(s.x)]
    if not drawn:
        return ""
    xs, ys = [x for s in drawn for x in s.x], [y for s in drawn for y in s.y]
    x_ticks = _ticks(min(xs), max(xs))
    y_ticks = _ticks(min(0.0, min(ys)) if y_from_zero else min(ys), max(ys))
    x_at = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_at = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_grid(x_ticks, y_ticks, x_at, y_at, min(xs), max(xs), x_label)]
    parts += [_line(s, x_at, y_at) for s in drawn]
    parts.append(_end_labels(drawn, x_at, y_at))
    legend = "".join(f'<span class="key {s.colour}">{html.escape(s.name)}</span>' for s in drawn) if drawn[1:] else ""
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><div class="legend">{legend}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
        "</figure>"
    )


def _thinned(series: Series) -> Series:
    """At most POINTS points, each the mean of its bin; what is not finite is left out."""
    points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None and math.isfinite(y)]
    size = math.ceil(len(points) / POINTS) or 1
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    x, y = ([sum(point[axis] for point in b) / len(b) for b in bins] for axis in (0, 1))
    return Series(series.name, x, y, series.colour, series.dots)


def _ticks(low: float | int, high: float | int, count: int = 5) -> list[float]:
    """Round numbers around low..high."""
    span = high - low or abs(high) or 1.0
    raw = span / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [float(i * step) for i in range(first, max(last, first + 1) + 1)]


def _scale(low: float | int, high: float | int, start: float | int, end: float | int):
    span = high - low or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _number(value: float | int) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _grid(x_ticks, y_ticks, x_at, y_at, low, high, x_label) -> str:
    parts = []
    for tick in y_ticks:
        y = y_at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick in x_ticks:
        if low <= tick <= high:
            place = f'x="{x_at(tick):.1f}" y="{HEIGHT - BOTTOM + 17}"'
            parts.append(f'<text class="tick" {place} text-anchor="middle">{_number(tick)}</text>')
    parts.append(
        f'<text class="tick" x="{WIDTH - RIGHT + 26}" y="{HEIGHT - BOTTOM + 17}">{html.escape(x_label)}</text>'
    )
    return "".join(parts)


def _line(series: Series, x_at, y_at) -> str:
    points = [(x_at(x), y_at(y)) for x, y in zip(series.x, series.y, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    radius = 3.5 if series.dots or len(points) == 1 else 7
    kind = "dot" if series.dots or len(points) == 1 else "hit"
    spots = "".join(
        f'<circle class="{kind} {series.colour}" cx="{px:.1f}" cy="{py:.1f}" r="{radius}">'
        f"<title>{html.escape(series.name)}: {_number(y)} at {_number(x)}</title></circle>"
        for (px, py), x, y in zip(points, series.x, series.y, strict=True)
    )
    return f'<polyline class="line {series.colour}" points="{path}"/>{spots}'


def _end_labels(drawn: list[Series], x_at, y_at) -> str:
    """The last value of each line beside its end, moved apart where they would touch."""
    ends = sorted(((y_at(s.y[-1]), s) for s in drawn), key=lambda end: end[0])
    places: list[float] = []
    for y, _ in ends:
        places.append(max(y, places[-1] + 13) if places else y)
    parts = []
    for i, (_, s) in enumerate(ends):
        y = min(places[i], HEIGHT - BOTTOM - 13 * (len(ends) - 1 - i))  # not upon the numbers of the axis
        parts.append(f'<text class="end" x="{x_at(s.x[-1]) + 8:.1f}" y="{y + 4:.1f}">{_number(s.y[-1])}</text>')
    return "".join(parts)
