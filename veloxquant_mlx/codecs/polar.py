"""Recursive polar coordinates: blocks of numbers as angles and one radius (PolarQuant).

Paper: Han, Kacham, Karbasi, Mirrokni, Zandieh, arXiv 2502.02617. For randomly rotated rows the angles of level ``l``
above the first have the density ``sin(2 psi)^(2^(l-1) - 1)`` on a quarter turn, and those of the first level are
uniform on the circle, all independent of each other and of the radius: fixed codebooks, and no scale per group.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from .base import F16_MAX, TILE, Axis, Codec, Codes, after, cast
from .levels import kept
from .packing import pack_bytes, unpack

if TYPE_CHECKING:
    from ..core.abstractions import ArtifactStore

BLOCK = 16  # numbers per radius
TURN = 2 * np.pi
SWEEPS = 60  # of Lloyd's algorithm where angles are fitted
# Query rows up to which tables are used: a fifth faster than decoded tiles for one row, no faster for two (8 heads of
# 128, 4096 rows, MLX 0.32.4 on the CPU).
TABLE_ROWS = 1


@cache
def angle_levels(level: int, bits: int) -> np.ndarray:
    """Lloyd-Max angles of ``level`` (2 and up), ascending and symmetric about pi/4; the array is read-only."""
    nodes = np.linspace(0, np.pi / 2, 20001)
    middle = (nodes[1:] + nodes[:-1]) / 2
    density = np.sin(2 * middle) ** (2 ** (level - 1) - 1)

    def cumulated(weights: np.ndarray) -> np.ndarray:
        return np.append(0, np.cumsum(weights))

    count = 1 << bits
    spread = cumulated(density ** (1 / 3))  # the best density of levels
    angles = np.interp((np.arange(count) + 0.5) / count, spread / spread[-1], nodes)
    mass, moment = cumulated(density), cumulated(density * middle)
    for _ in range(20000):
        edges = np.concatenate([[0], (angles[1:] + angles[:-1]) / 2, [np.pi / 2]])
        update = np.diff(np.interp(edges, nodes, moment)) / np.diff(np.interp(edges, nodes, mass))
        update = (update + np.pi / 2 - update[::-1]) / 2
        change, angles = np.abs(update - angles).max(), update
        if change < 1e-10:
            break
    angles.setflags(write=False)
    return angles


class Polar(Codec):
    """``bits`` per angle and ``bits + 2`` on the first level, whose range is four times as wide.

    Rows are cut into blocks of 16 (the largest smaller power of two that divides ``dim`` where 16 does not). Codes:
    ``first`` uint8 ``(B, H, n, bytes)`` with ``dim / 2`` codes, ``upper`` uint8 with the codes of the other levels, one
    level after another (7/16 dim), ``radii`` float16 ``(B, H, n, dim / 16)``, the radius of a block over the root of
    its size, which cannot overflow where the input did not. Streams end in whole bytes.

    With ``fit_rows`` the angles of a sequence's own first rows give the codebooks, one per level for all heads, by
    Lloyd's algorithm from the fixed ones: ``angles1`` float32 ``(B, 2 ** (bits + 2))``, on the circle, and ``angles``
    ``(B, levels - 1, 2 ** bits)``. The paper seeds at random [design].
    """

    def __init__(self, dim: int, bits: int, fit_rows: int = 0, store: ArtifactStore | None = None) -> None:
        self.dim, self.bits, self.fit_rows = dim, bits, fit_rows
        self.size = min(dim & -dim, BLOCK)
        self.levels = self.size.bit_length() - 1
        self.layout = {"first": Axis(2, 1), "radii": Axis(2, 1)}
        count, more = 1 << bits, 4 << bits
        upper = [kept(angle_levels(i, bits), f"polar{i}", bits, dim, store) for i in range(2, self.levels + 1)]
        self._angles1 = mx.array(((np.arange(more) + 0.5) * TURN / more).astype(np.float32))[None]
        self._angles = mx.array(np.array(upper, dtype=np.float32).reshape(1, -1, count))
        if upper:
            self.layout |= {"upper": Axis(2, 1)}
        mx.eval(self._angles1, self._angles)

    # ------------------------------------------------------------------------------------------------------ codebooks

    def fit(self, x: mx.array) -> Codes:
        psi, upper, _ = self._coordinates(x)
        b, count = x.shape[0], 1 << self.bits
        first = [_lloyd(angles.reshape(-1), self._angles1[0], TURN) for angles in psi]
        rest = [
            [_lloyd(level[i].reshape(-1), start) for level, start in zip(upper, self._angles[0], strict=True)]
            for i in range(b)
        ]
        flat = [angles for sequence in rest for angles in sequence]
        return {
            "angles1": mx.stack(first),
            "angles": mx.stack(flat).reshape(b, -1, count) if flat else mx.zeros((b, 0, count)),
        }

    def bind(self, fitted: Codes) -> Polar:
        """This codec with the codebooks of ``fit``."""
        bound = copy.copy(self)
        bound._angles1, bound._angles = fitted["angles1"], fitted["angles"]
        return bound

    # ---------------------------------------------------------------------------------------------------------- codes

    def _coordinates(self, x: mx.array) -> tuple[mx.array, list[mx.array], mx.array]:
        """Angles of the first level in [0, 2 pi) ``(B, H, n, D / 2)``, those of each other level, radii of blocks."""
        x = x.astype(mx.float32)
        largest = mx.maximum(mx.abs(x).max(-1, keepdims=True), 1e-30)  # squares of what is left fit in float32
        radius, angles = x / largest, []
        for _ in range(self.levels):
            a, b = radius[..., 0::2], radius[..., 1::2]
            angles.append(mx.arctan2(b, a))
            radius = mx.sqrt(a * a + b * b)
        first = mx.where(angles[0] < 0, angles[0] + TURN, angles[0])
        return first, angles[1:], radius * largest

    def encode(self, x: mx.array) -> Codes:
        psi, upper, radii = self._coordinates(x)
        last = ((self._angles1[:, -1] + self._angles1[:, 0] + TURN) / 2).reshape(-1, 1, 1, 1)
        # nearest on the circle: the cell of the last angle, or of the first, goes on behind 2 pi
        psi = mx.where(psi < last - TURN, psi + TURN, psi)
        middles = mx.concatenate([_middles(self._angles1), last.reshape(-1, 1)], axis=1)
        codes = {"first": pack_bytes(_search(psi, middles) % (4 << self.bits), self.bits + 2)}
        if upper:
            places = [_search(angles, _middles(self._angles[:, i])) for i, angles in enumerate(upper)]
            codes["upper"] = pack_bytes(mx.concatenate(places, axis=-1), self.bits)
        return codes | {"radii": mx.minimum(radii / self.size**0.5, F16_MAX).astype(mx.float16)}

    def _turns(self, codes: Codes) -> list[mx.array]:
        """Cosines and sines of the angles of every level but the first, ``(B, H, n, D / 2 ** level, 2)``."""
        if "upper" not in codes:
            return []
        per = [self.dim >> level for level in range(2, self.levels + 1)]
        place = np.repeat(np.arange(len(per)) << self.bits, per).astype(np.uint8)
        index = unpack(codes["upper"], self.bits, place.size) + mx.array(place)
        turns = _take(index, self._angles)
        return list(mx.split(turns, np.cumsum(per)[:-1].tolist(), axis=-2))

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        radius = codes["radii"].astype(mx.float32) * self.size**0.5
        first = _take(unpack(codes["first"], self.bits + 2, self.dim // 2), self._angles1)
        for turn in (*reversed(self._turns(codes)), first):
            radius = (radius[..., None] * turn).reshape(*radius.shape[:-1], -1)
        return cast(radius, dtype)

    # ------------------------------------------------------------------------------------------------------ attention

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        """Few query rows look up what each first-level code adds in tables of the query; no row is decoded."""
        if q.shape[2] > TABLE_ROWS or mx.default_device() == mx.gpu:
            return super().scores(q, codes)
        *lead, dim = q.shape
        turns = mx.stack([mx.cos(self._angles1), mx.sin(self._angles1)], axis=1)[:, None]
        tables = (q.astype(mx.float32).reshape(*lead, dim // 2, 2).reshape(*lead[:2], -1, 2) @ turns).reshape(*lead, -1)
        narrow = mx.uint16 if tables.shape[-1] <= 1 << 16 else mx.uint32
        first = mx.arange(0, tables.shape[-1], 4 << self.bits, dtype=mx.uint32).astype(narrow)
        parts: list[mx.array] = []
        for tile in self.tiles(codes, TILE):
            tile = after(tile, parts[-1:])
            index = (unpack(tile["first"], self.bits + 2, dim // 2).astype(narrow) + first)[:, :, None]
            b, h, _, n, pairs = index.shape
            index = mx.broadcast_to(index.reshape(b, h, 1, n * pairs), (*lead, n * pairs))
            sums = mx.take_along_axis(tables, index, axis=-1).reshape(*lead, n, pairs)
            for turn in self._turns(tile):
                sums = sums[..., 0::2] * turn[:, :, None, ..., 0] + sums[..., 1::2] * turn[:, :, None, ..., 1]
            radii = tile["radii"].astype(mx.float32)[:, :, None]
            parts.append(((sums * radii).sum(-1) * self.size**0.5).astype(q.dtype))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _middles(angles: mx.array) -> mx.array:
    """Thresholds ``(B, K - 1)`` between ascending ``angles`` ``(B, K)``."""
    return (angles[:, 1:] + angles[:, :-1]) / 2


def _search(x: mx.array, middles: mx.array) -> mx.array:
    """How many of ``middles`` ``(B | 1, K)``, which ascend, lie below each number of ``x`` ``(B, ...)``."""
    parts = [x] if middles.shape[0] == 1 else mx.split(x, x.shape[0])
    return mx.concatenate([mx.searchsorted(own, part) for own, part in zip(middles, parts, strict=True)])


def _take(codes: mx.array, angles: mx.array) -> mx.array:
    """Cosine and sine ``(..., 2)`` in float32 of the angles ``(B | 1, ...)`` that ``codes`` ``(B, ...)`` name."""
    table = mx.stack([mx.cos(angles), mx.sin(angles)], axis=-1).reshape(angles.shape[0], -1).view(mx.uint64)
    flat = codes.reshape(angles.shape[0], -1)
    return mx.take_along_axis(table, flat, axis=1).view(mx.float32).reshape(*codes.shape, 2)


def _lloyd(x: mx.array, start: mx.array, turn: float = 0.0) -> mx.array:
    """Angles with the least squared error on ``x`` ``(N,)`` near ``start``; on a circle where it has a full ``turn``.

    A cell without angles keeps its level.
    """
    x = mx.sort(x)
    if turn:
        x = mx.concatenate([x - turn, x, x + turn])
    sums = mx.concatenate([mx.zeros(1), mx.cumsum(x - start.mean())])
    levels = start
    for _ in range(SWEEPS):
        inner = (levels[1:] + levels[:-1]) / 2
        low = (levels[:1] + levels[-1:] - turn) / 2 if turn else mx.array([-mx.inf])
        high = low + turn if turn else mx.array([mx.inf])
        edges = mx.searchsorted(x, mx.concatenate([low, inner, high]))
        count = edges[1:].astype(mx.int32) - edges[:-1].astype(mx.int32)
        total = mx.take(sums, edges[1:]) - mx.take(sums, edges[:-1])
        levels = mx.where(count > 0, total / mx.maximum(count, 1) + start.mean(), levels)
    return levels
