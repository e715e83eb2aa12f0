"""Drawings of a comparison, by matplotlib (extra ``plots``): SVG text for pages, one picture as a file.

Nothing here opens a window or touches pyplot's global state.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.text import kl
from .labels import FAR, nearest, place
from .results import Comparison, Row, front

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that hold on white and on black, and a shape each, so that none is told by colour alone.
FAMILIES: dict[str, tuple[str, str]] = {
    "group quantization": ("#2f80d8", "o"),
    "rotation": ("#e07a10", "s"),
    "vector quantization": ("#c7458f", "^"),
    "low rank": ("#8f62d6", "P"),
    "cross-layer": ("#d4473c", "X"),
    "entropy coding": ("#0f9fae", "p"),
    "eviction": ("#2c9c5a", "D"),
    "merging": ("#94742a", "v"),
    "tiered": ("#7d8590", "h"),
    "retrieval": ("#b89b00", "*"),
}
PAIR = ("two methods", ("#a0627a", "d"))
LEAST_KL = 1e-4  # a smaller one is drawn here
LOSS = "mean KL, nats (smaller is better)"
ERRORS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # of a layer: bounds of the colours
FOUND = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# Colours of paper, and the variables that stand in their place on a page, which may be dark.
INK, FAINT, PAGE = "#1c2126", "#d5dae0", "#fefefe"
VARIABLES = {INK: "var(--ink)", FAINT: "var(--line)", PAGE: "var(--page)"}


def kind(row: Row) -> str:
    """The family of a row as the plots name it."""
    return PAIR[0] if "+" in row.method else row.family


def look(family: str) -> tuple[str, str]:
    """Colour and marker of a family."""
    return dict([*FAMILIES.items(), PAIR]).get(family, PAIR[1])


def held(row: Row) -> float:
    """Bits held per number over all layers of the model: the bytes, 16 for those of 16-bit keys and values."""
    assert row.ratio is not None
    return 16 / row.ratio


def names(rows: Sequence[Row]) -> dict[str, str]:
    """What a drawing calls rows, by label: the method where it has one row."""
    methods = [row.method for row in rows]
    return {row.label: row.method if methods.count(row.method) == 1 else row.label for row in rows}


def pareto(found: Sequence[Comparison], path: Path) -> None:
    """Write a picture of the fronts of one or more models side by side, as SVG or PNG after the suffix of ``path``.

    Raises ``ImportError`` without matplotlib.
    """
    with _style("path"):
        figure = _figure(6.3 * len(found), 6.2)
        panels = figure.subplots(1, len(found), squeeze=False, gridspec_kw={"wspace": 0.16})[0]
        panels[0].set_ylabel(LOSS)
        for axes, one in zip(panels, found, strict=True):
            _front(axes, one)
            axes.set_title(f"{one.model.name}, {one.ctx:,} tokens", loc="left", fontweight="bold")
        _families(figure, panels[0], [row for one in found for row in one.rows])
        if path.suffix != ".svg":
            figure.savefig(path, bbox_inches="tight", dpi=160)
            return
        text = ", ".join(one.model.name for one in found)
        told = f"Mean KL against bits held, a point for every method: {text}."
        svg = _svg(figure, "pareto", "What compression costs and saves", told, page=False)
        path.write_text(svg + "\n", encoding="utf-8")


def drawn(found: Comparison) -> list[Row]:
    """The rows that have a place in the plane of bytes and KL."""
    return [row for row in found.rows if row.error is None and row.mean_kl is not None and row.ratio and row.bytes]


def front_plot(found: Comparison) -> str | None:
    """SVG: mean KL against the bytes held, the front as a line; None where no row has both."""
    if not drawn(found):
        return None
    best = ", ".join(row.label for row in sorted(front(found.rows), key=held))
    with _style():
        figure = _figure(12.4, 7.2)
        axes = figure.subplots()
        axes.set_ylabel(LOSS)
        _front(axes, found)
        _families(figure, axes, found.rows)
        told = f"Rows that no other beats, from fewest bytes: {best}."
        tips = [f"{row.label}: {held(row):.2f} bits, KL {kl(row.mean_kl)}" for row in drawn(found)]
        return _svg(figure, "front", "Mean KL against the bytes held", told, tips)


def layer_plot(rows: Sequence[Row]) -> str | None:
    """SVG: the error of every layer, a line for every row; None where no row has any."""
    rows = [row for row in rows if row.layer_error and any(error is not None for error in row.layer_error)]
    if not rows:
        return None
    cells = [[math.nan if error is None else error for error in row.layer_error or ()] for row in rows]
    count = max(map(len, cells))
    cells = [[*line, *[math.nan] * (count - len(line))] for line in cells]
    with _style():
        figure, axes = _cells([row.label for row in rows], cells, ERRORS, "YlOrRd", "relative error", 0.08)
        step = max(1, math.ceil(count / 16))
        axes.set_xticks([i + 0.5 for i in range(0, count, step)], [str(i + 1) for i in range(0, count, step)])
        axes.set_xlabel("compressed layer, from the first")
        told = (
            f"Relative error of the attention output of {count} layers for {len(rows)} rows, in the order of the table."
        )
        return _svg(figure, "layers", "Error per layer", told)


def needle_plot(found: Comparison, rows: Sequence[Row]) -> str | None:
    """SVG: shares of needles found by length and depth, a line for every row; None where no row has any."""
    grids = [(row.label, row.needle) for row in rows if row.needle is not None]
    if not grids:
        return None
    if found.uncompressed is not None and found.uncompressed.needle is not None:
        grids.insert(0, ("uncompressed", found.uncompressed.needle))
    first = grids[0][1]
    grids = [(label, grid) for label, grid in grids if (grid.lengths, grid.depths) == (first.lengths, first.depths)]
    cells = [[sum(keys) / len(keys) for length in grid.score for keys in length] for _, grid in grids]
    cells.append([sum(column) / len(column) for column in zip(*cells[1:] or cells, strict=True)])
    wide = len(first.depths)
    with _style():
        labels = [*(label for label, _ in grids), "mean of all rows"]
        figure, axes = _cells(labels, cells, FOUND, "GnBu", "share of facts found", 0.3)
        places = [f"{depth:.0%}" for _ in first.lengths for depth in first.depths]
        axes.set_xticks([i + 0.5 for i in range(len(places))], places)
        axes.set_xlabel("depth: where in the text the fact stands, 0% is the beginning")
        for i, length in enumerate(first.lengths):
            axes.text(wide * (i + 0.5), -0.35, f"{length:,} tokens", ha="center", va="bottom", fontweight="bold")
            if i:
                axes.axvline(wide * i, color=PAGE, linewidth=6)
        for line in (1, len(labels) - 1):
            axes.axhline(line, color=PAGE, linewidth=4)
        told = f"{len(grids)} rows, texts of {', '.join(map(str, first.lengths))} tokens, {wide} depths each."
        return _svg(figure, "needles", "Needles found by length and depth", told)


# ------------------------------------------------------------------------------------------------------- drawing


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib. Install the extra 'plots': pip install 'veloxquant-mlx[plots]'"
        ) from error
    return matplotlib


@contextmanager
def _style(fonttype: str = "none") -> Iterator[None]:
    """Settings of matplotlib while a figure is drawn: our colours, ids that do not change, text without formulas."""
    ours = {
        "font.family": "sans-serif",
        "font.size": 10.5,
        "axes.titlesize": 12,
        "axes.labelsize": 11,
        "svg.fonttype": fonttype,
        "svg.hashsalt": "veloxquant",
        "text.parse_math": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), FAINT),
        **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), PAGE),
    }
    with _matplotlib().rc_context(ours):
        yield


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height))
    FigureCanvasAgg(figure)  # measures text
    return figure


def _front(axes: Axes, found: Comparison) -> None:
    """Points, the front and as many names as fit; a point's name is its tooltip on a page."""
    rows = drawn(found)
    best = sorted(front(rows), key=held)
    at = {row.label: (held(row), max(row.mean_kl or 0, LEAST_KL)) for row in rows}
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0)
    ticks = [1, 1.5, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("held: bits per number, everything counted (16: uncompressed)")
    powers = [10.0**power for power in range(-3, 3)]
    axes.set_yticks([LEAST_KL, *powers], [f"≤ {LEAST_KL:g}", *(f"{power:g}" for power in powers)])
    axes.set_yticks([], minor=True)
    if not rows:
        return  # a panel beside others
    xs, ys = zip(*at.values(), strict=True)
    axes.set_xlim(min(xs) / 1.15, max(*xs, 8) * 1.15)
    axes.set_ylim(min(ys) / 1.8, max(*ys, min(ys) * 10) * 1.8)
    line = [at[row.label] for row in best]
    axes.step(*zip(*line, strict=True), where="post", color=INK, linewidth=1.2, alpha=0.45, zorder=1)
    for i, row in enumerate(rows):
        colour, marker = look(kind(row))
        size = 11 if marker == "*" else 7.5
        (dot,) = axes.plot(*at[row.label], marker, color=colour, markersize=size, markeredgecolor=PAGE, zorder=3)
        dot.set_gid(f"dot-{i}")
    _label(axes, rows, at, best)


def _label(axes: Axes, rows: Sequence[Row], at: Mapping[str, tuple[float, float]], best: Sequence[Row]) -> None:
    """Write names beside points, those of the front first, with a line to those that had to move away."""
    figure: Any = axes.figure
    draw = figure.canvas.get_renderer()
    figure.draw(draw)
    ordered, called = [*best, *(row for row in rows if row not in best)], names(rows)

    def points(x: float, y: float) -> tuple[float, float]:
        """In points of type."""
        x, y = axes.transData.transform((x, y)) * 72 / figure.dpi
        return x, y

    def back(x: float, y: float) -> tuple[float, float]:
        return tuple(axes.transData.inverted().transform((x * figure.dpi / 72, y * figure.dpi / 72)))

    texts = [
        axes.text(0, 0, called[row.label], color=INK, size=9, weight="bold" if row in best else "normal", zorder=4)
        for row in ordered
    ]
    boxes = [text.get_window_extent(draw) for text in texts]
    edge, scale = axes.get_window_extent(draw), 72 / figure.dpi
    stairs = [points(*at[row.label]) for row in best]
    steps = [
        box
        for (x0, y0), (x1, y1) in itertools.pairwise(stairs)
        for box in ((x0, y0 - 1, x1, y0 + 1), (x1 - 1, y1, x1 + 1, y0))
    ]
    placed = place(
        [points(*at[row.label]) for row in ordered],
        [(box.width * scale, box.height * scale) for box in boxes],
        (edge.x0 * scale, edge.y0 * scale, edge.x1 * scale, edge.y1 * scale),
        steps,
    )
    for row, text, box in zip(ordered, texts, placed, strict=True):
        if box is None:
            text.remove()
            continue
        text.set(position=back((box[0] + box[2]) / 2, (box[1] + box[3]) / 2), ha="center", va="center")
        x, y, far = nearest(box, *points(*at[row.label]))
        if far > FAR:
            (x, y), dot = back(x, y), at[row.label]
            axes.plot([dot[0], x], [dot[1], y], color=look(kind(row))[0], linewidth=0.8, alpha=0.7, zorder=2)


def _families(figure: Figure, axes: Axes, rows: Sequence[Row]) -> None:
    """The legend under the panels: families that occur, and the front."""
    from matplotlib.lines import Line2D

    present = {kind(row) for row in rows if row.error is None}
    order = [*(name for name in FAMILIES if name in present), *sorted(present - set(FAMILIES))]
    marks = [
        Line2D([], [], color=look(name)[0], marker=look(name)[1], linestyle="", markersize=8, label=name)
        for name in order
    ]
    marks.append(Line2D([], [], color=INK, alpha=0.45, linewidth=1.2, label="no other row beats these"))
    columns = min(6, len(marks))
    figure.legend(handles=marks, loc="upper center", bbox_to_anchor=(0.5, 0.04), ncols=columns, frameon=False)


def _cells(
    labels: Sequence[str],
    cells: Sequence[Sequence[float]],
    bounds: Sequence[float],
    colours: str,
    about: str,
    gap: float,
) -> tuple[Figure, Axes]:
    """A heat map with a row for every label and colours in steps; values outside ``bounds`` take the end colours.

    ``gap`` inches stay free under the legend, which is headed ``about``.
    """
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    height = 0.215 * len(labels)
    figure = _figure(9.6, height)
    axes = figure.add_axes((0, 0, 1, 1))
    steps = [colormaps[colours](0.06 + 0.9 * i / (len(bounds) - 2)) for i in range(len(bounds) - 1)]
    norm = BoundaryNorm(bounds, len(steps), clip=True)
    axes.pcolormesh(cells, cmap=ListedColormap(steps), norm=norm, edgecolors=PAGE, linewidth=1.2)
    axes.set_ylim(len(labels), 0)
    axes.set_yticks([i + 0.5 for i in range(len(labels))], labels)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    last = len(steps) - 1
    ranges = [
        f"under {high:g}" if i == 0 else f"{low:g} and more" if i == last else f"{low:g} to {high:g}"
        for i, (low, high) in enumerate(itertools.pairwise(bounds))
    ]
    keys = [Patch(color=colour, label=text) for colour, text in zip(steps, ranges, strict=True)]
    axes.legend(
        handles=keys,
        title=about,
        loc="lower left",
        bbox_to_anchor=(0, 1 + gap / height),
        ncols=len(keys),
        frameon=False,
        alignment="left",
        handlelength=1.2,
        columnspacing=1.2,
    )
    return figure, axes


def _svg(figure: Figure, name: str, title: str, told: str, tips: Sequence[str] = (), page: bool = True) -> str:
    """The figure as one element without size, with a title for screen readers and ids that begin with ``name``.

    ``tips`` are tooltips of the dots.
    """
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(out, format="svg", bbox_inches="tight", pad_inches=0.08, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :].strip().replace("xlink:href", "href")
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", text)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    if page:
        for colour, variable in VARIABLES.items():
            text = text.replace(colour, variable)
    for i, tip in enumerate(tips):
        text = text.replace(f'<g id="{name}-dot-{i}">', f'<g id="{name}-dot-{i}"><title>{escape(tip)}</title>')
    box = re.search(r'viewBox="[^"]+"', text)
    assert box is not None
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box[0]} role="img" '
        f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(told)}</desc>'
    )
    return head + text[text.index(">") + 1 :]
