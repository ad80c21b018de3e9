"""A line chart as SVG, logarithmic in both directions: what a browser shows without any plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

WIDTH: Final = 640
HEIGHT: Final = 420
LEFT: Final = 70
RIGHT: Final = 150
TOP: Final = 40
BOTTOM: Final = 50
COLOURS: Final = (
    "#1b6ca8", "#c8553d", "#3a7d44", "#8e5ea2", "#b8860b", "#444444", "#00868b", "#d87093", "#6b8e23",
    "#7a5230",
)  # fmt: skip

Series = Mapping[str, Sequence[tuple[float, float]]]


def document(charts: Sequence[tuple[str, str, str, Series]]) -> str:
    """Charts below each other."""
    body = "".join(
        f'<g transform="translate(0 {index * HEIGHT})">{_chart(*one)}</g>' for index, one in enumerate(charts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT * len(charts)}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{body}</svg>\n"
    )


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _chart(title: str, x_name: str, y_name: str, series: Series) -> str:
    points = [point for line in series.values() for point in line]
    if not points:
        return f'<text x="{LEFT}" y="{TOP}">{escape(title)}: no points</text>'
    (x0, x1), (y0, y1) = _decades([x for x, _ in points]), _decades([y for _, y in points])
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + wide * (math.log10(x) - x0) / (x1 - x0),
            TOP + high * (1 - (math.log10(y) - y0) / (y1 - y0)),
        )

    out = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    for exponent in range(x0, x1 + 1):
        x, _ = place(10.0**exponent, 10.0**y0)
        out.append(f'<path d="M{x:.1f} {TOP}V{TOP + high}" stroke="#ddd"/>')
        out.append(f'<text x="{x:.1f}" y="{TOP + high + 18}" text-anchor="middle">{10.0**exponent:g}</text>')
    for exponent in range(y0, y1 + 1):
        _, y = place(10.0**x0, 10.0**exponent)
        out.append(f'<path d="M{LEFT} {y:.1f}H{LEFT + wide}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**exponent:g}</text>')
    out.append(f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_name)}</text>')
    out.append(
        f'<text x="14" y="{TOP + high / 2}" transform="rotate(-90 14 {TOP + high / 2})" '
        f'text-anchor="middle">{escape(y_name)}</text>'
    )
    for index, (name, line) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in sorted(line)))
        if path:
            out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        out.append(
            f'<text x="{WIDTH - RIGHT + 10}" y="{TOP + 14 + 16 * index}" '
            f'fill="{colour}">{escape(name)}</text>'
        )
    return "".join(out)
