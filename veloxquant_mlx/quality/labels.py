"""Where names of points go in a drawing, so that none lies on another, on a point or on a line to one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[float, float, float, float]  # left, bottom, right, top
DOT = 4.5  # half the width that a point takes, in points of type
DISTANCES = (6.0, 11.0, 17.0, 24.0, 32.0, 42.0, 54.0, 68.0)
FAR = 9.0  # from here on a name needs a line to its point
TURNS = (0, 8, 4, 12, 2, 14, 6, 10, 1, 15, 7, 9, 3, 5, 13, 11)  # of 16: right, left, above, below, then between


def place(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    edge: Box,
    obstacles: Sequence[Box] = (),
) -> list[Box | None]:
    """A box of the given size near every point and inside ``edge``; None where there is no room. First come first.

    No name lies on ``obstacles``; lines to names may cross them. A name without a line is nearest to its own point.
    """
    dots = [(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in points]
    names: list[Box] = []
    lines = [*obstacles]
    found: list[Box | None] = []
    for (x, y), size in zip(points, sizes, strict=True):
        free = None
        for box in _around(x, y, *size):
            inside = box[0] >= edge[0] and box[1] >= edge[1] and box[2] <= edge[2] and box[3] <= edge[3]
            if not inside or any(overlap(box, other) for other in (*dots, *names, *lines)):
                continue
            line = _line(box, x, y)
            others = [dot for dot in dots if not overlap(dot, (x, y, x + 1e-9, y + 1e-9))]
            if not line and _nearer(points, box, x, y):
                continue
            if not any(overlap(piece, other) for piece in line for other in (*names, *others)):
                free = box
                names.append(box)
                lines += line
                break
        found.append(free)
    return found


def overlap(a: Box, b: Box) -> bool:
    """Whether two boxes share any room."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def nearest(box: Box, x: float, y: float) -> tuple[float, float, float]:
    """The place of ``box`` that is nearest to a point, and how far it is."""
    nx, ny = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
    return nx, ny, math.hypot(nx - x, ny - y)


def _nearer(points: Sequence[tuple[float, float]], box: Box, x: float, y: float) -> bool:
    """Whether another point is about as near to ``box`` as its own."""
    far = nearest(box, x, y)[2] + DOT
    return any(nearest(box, *point)[2] < far for point in points if point != (x, y))


def _around(x: float, y: float, width: float, height: float) -> Iterator[Box]:
    for distance in DISTANCES:
        for turn in TURNS:
            angle = turn * math.pi / 8
            left = x + math.cos(angle) * (distance + width / 2) - width / 2
            low = y + math.sin(angle) * (distance + height / 2) - height / 2
            yield left, low, left + width, low + height


def _line(box: Box, x: float, y: float) -> list[Box]:
    """Pieces of the line from a point to its name, none where the name is near."""
    nx, ny, far = nearest(box, x, y)
    if far <= FAR:
        return []
    parts = [i / 12 for i in range(2, 12)]
    return [
        (px - 0.5, py - 0.5, px + 0.5, py + 0.5) for t in parts for px, py in [(x + t * (nx - x), y + t * (ny - y))]
    ]
