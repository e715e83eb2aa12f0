"""Line charts as SVG, with nothing to install."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Lines = Mapping[str, Sequence[tuple[float, float]]]

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, KEY = 360, 300, 50, 40, 50, 200
COLOURS = ("#222222", "#999999", "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7")


def svg(title: str, across: str, panels: Mapping[str, Lines]) -> str:
    """Panels side by side with one scale: ``across`` on a logarithmic axis, and one key for all lines."""
    points = [p for lines in panels.values() for line in lines.values() for p in line]
    xs = sorted({x for x, _ in points})
    low, high, most = math.log2(xs[0]), math.log2(xs[-1]), 1.1 * max(y for _, y in points)
    step = next(s for s in (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0) if most / s <= 8 or s == 100.0)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    inner, down = WIDTH - LEFT - 20, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log2(x) - low) / (high - low) if high > low else 0.5
        return LEFT + share * inner, HEIGHT - BOTTOM - y / most * down

    out = [_text(10, 16, title, "start")]
    for at, (panel, lines) in enumerate(panels.items()):
        out.append(f'<g transform="translate({at * WIDTH},0)">' + _text(LEFT + inner / 2, TOP - 6, panel))
        for i in range(int(most / step) + 1):
            _, y = place(xs[0], i * step)
            out.append(
                f'<path d="M{LEFT} {y:.1f}h{inner}" stroke="#ddd"/>' + _text(LEFT - 5, y + 4, f"{i * step:g}", "end")
            )
        out += [_text(place(x, 0)[0], HEIGHT - BOTTOM + 16, _short(x)) for x in xs]
        out.append(_text(LEFT + inner / 2, HEIGHT - 12, across))
        for name, line in lines.items():
            places = [place(*p) for p in sorted(line)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour[name]}" stroke-width="1.5"/>')
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour[name]}"/>' for x, y in places]
        out.append("</g>")
    edge = len(panels) * WIDTH
    for i, name in enumerate(names):
        y = TOP + 18 * i
        out.append(f'<path d="M{edge} {y}h18" stroke="{colour[name]}" stroke-width="3"/>')
        out.append(_text(edge + 24, y + 4, name, "start"))
    size = f'width="{edge + KEY}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *out, "</svg>\n"])


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _short(x: float) -> str:
    return next((f"{x / 2**p:g}{unit}" for unit, p in (("M", 20), ("k", 10)) if x >= 2**p), f"{x:g}")
