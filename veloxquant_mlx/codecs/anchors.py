"""Rows as multiples of a few anchor rows, and coded residuals for those that matter most.

The layout of AnchorKV (Khalaf et al., arXiv 2608.02901) for one side, keys or values, of one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from ..transforms.rotation import rotation as random_rotation
from .base import F16_MAX, TILE, Codes, GuidedCodec, after, cast, compute_dtype, take_rows
from .codebook import ScalarCodebook
from .levels import lloyd_max
from .packing import pack, padded, row_multiple, unpack
from .transformed import Transformed

if TYPE_CHECKING:
    from ..models.rope import Rotation

# Fields of what the guide gives per row, int32 ``(B, H, n, 5 | 6)``: whether it is an anchor; for keys and for values
# its own anchor and whether it has a residual; its position, where that is not the index of the row.
ANCHOR, OWNER, RESIDUAL, POSITION = 0, (1, 2), (3, 4), 5
KEYS, VALUES = 0, 1
SMALLEST = 1e-4  # rms of an anchor that other rows can be multiples of: float16 holds the factors


@dataclass(frozen=True)
class Plan:
    """What a prompt may hold: ``theta`` of the bytes of its 16-bit rows, of ``dims`` numbers per key and value.

    Anchors are the newest ``window`` rows and as many more as make a share of ``fraction``. A residual has ``bits`` per
    number. Anchors count with 2 bytes per number, which is less than they take where rows are float32.
    """

    theta: float
    window: int
    fraction: float
    bits: int
    dims: tuple[int, int]

    def anchors(self, n: int) -> int:
        """Anchors per head among ``n`` rows."""
        return min(n, max(self.window, int(n * self.fraction)))

    def base(self, n: int, positions: bool = False) -> int:
        """Bytes per head without residuals: anchors and their places, factors, bit maps, ``positions`` if held."""
        k = self.anchors(n)
        rows = k * 2 * sum(self.dims) + 2 * (k - min(self.window, k)) * place_dtype(n).size
        return (
            rows
            + 2 * (n - k) * (place_dtype(k).size + 2)
            + (2 * padded(n, 32) // 8 if n > k else 0)
            + positions * 4 * n
        )

    def slots(self, n: int, heads: int, positions: bool = False) -> tuple[int, int]:
        """Residuals of keys and of values that all ``heads`` together have room for: half of them each."""
        key, value = (padded(d, row_multiple(self.bits)) * self.bits // 8 + 2 for d in self.dims)
        room = self.theta * heads * n * 2 * sum(self.dims) - heads * self.base(n, positions)
        both = max(0, int(2 * room / (key + value) + 1e-9))
        k, v = both // 2, both - both // 2
        v -= k * key + v * value > room and v > 0
        most = heads * (n - self.anchors(n))
        return min(k, most), min(v, most)

    def least(self) -> int | None:
        """Tokens from which on a prompt stays within ``theta``; None where it never does."""

        def fits(n: int) -> bool:
            return self.base(n) <= self.theta * n * 2 * sum(self.dims)

        low, high = 0, 1
        while not fits(high):
            low, high = high, 2 * high
            if high > 1 << 30:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high


def place_dtype(n: int) -> mx.Dtype:
    """The smallest dtype of indices below ``n``."""
    return mx.uint8 if n <= 1 << 8 else mx.uint16 if n <= 1 << 16 else mx.uint32


def owners(x: mx.array, anchors: mx.array) -> mx.array:
    """Of ``anchors`` ``(B, H, k, D)`` the index ``(B, H, n)`` of the one with the largest ``|cos|`` to each row."""
    size = mx.sqrt(mx.square(anchors).sum(axis=-1))[:, :, None]
    usable = size > SMALLEST * anchors.shape[-1] ** 0.5
    parts: list[mx.array] = []
    for start in range(0, x.shape[2], 4 * TILE):
        rows = mx.depends([x[:, :, start : start + 4 * TILE]], parts[-1:])[0]
        cosine = mx.abs(rows @ anchors.swapaxes(-1, -2)) / mx.maximum(size, 1e-30)
        parts.append(mx.argmax(mx.where(usable, cosine, -1.0), axis=-1).astype(mx.int32))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def factors(x: mx.array, own: mx.array) -> mx.array:
    """``<x, a> / |a|^2`` ``(B, H, n)`` in float16, which leaves the least of ``x``; 0 for an anchor too small."""
    energy = mx.square(own).sum(axis=-1)
    usable = energy > SMALLEST**2 * own.shape[-1]
    gamma = mx.where(usable, (x * own).sum(axis=-1) / mx.maximum(energy, 1e-30), 0.0)
    return mx.clip(gamma, -F16_MAX, F16_MAX).astype(mx.float16)


class AnchorResiduals(GuidedCodec):
    """One block of any number of rows: anchors as they came, others as ``gamma * anchor`` and maybe a residual.

    ``side`` is KEYS or VALUES. With ``rope``, factors are those of keys before their rotary position. Residuals are
    rotated by ``seed``, divided by their rms and coded by the levels of normal numbers. Codes, for k anchors of n rows:
    ``anchors`` ``(B, H, k, D)`` in the dtype of the rows, ``places`` ``(B, H, k - window)`` of all but the newest,
    ``owner`` and ``gamma`` float16 ``(B, H, n - k)`` of the others, ``slots`` uint32 ``(B, H, ceil(n / 32))`` with one
    bit per row, ``words`` and ``rms`` of the residuals of all heads ``(B, 1, N, ...)``, one head after another, and
    ``positions`` int32 ``(B, H, n)`` where those are not the indices of the rows. What is empty is left out.
    """

    def __init__(self, plan: Plan, side: int, seed: int, rope: Rotation | None = None) -> None:
        dim = plan.dims[side]
        self.plan, self.side, self.rope = plan, side, rope
        self.layout = {}
        self.residuals = Transformed(
            ScalarCodebook(dim, lloyd_max(plan.bits), plan.bits), random_rotation(dim, seed, tag=side)
        )

    def encode(self, x: mx.array) -> Codes:
        raise NotImplementedError("anchors are chosen by a guide")

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return self.rows(codes, 0, self.n_tokens(codes), dtype)

    def n_tokens(self, codes: Codes) -> int:
        return codes["anchors"].shape[2] + (codes["owner"].shape[2] if "owner" in codes else 0)

    def encode_guided(self, x: mx.array, guide: mx.array) -> Codes:
        b, h, n, _ = x.shape
        k, tail = self.plan.anchors(n), min(self.plan.window, n)
        order = mx.argsort(mx.where(guide[..., ANCHOR] > 0, 0, n) + mx.arange(n, dtype=mx.int32), axis=-1)
        first, rest = order[..., :k], order[..., k:]
        codes = {"anchors": take_rows(x, first)}
        positions = guide[..., POSITION] if guide.shape[-1] > POSITION else None
        if positions is not None and self.rope is not None:
            codes["positions"] = positions
        if k == n:
            return codes
        if k > tail:
            codes["places"] = first[..., : k - tail].astype(place_dtype(n))
        where = mx.arange(n, dtype=mx.int32)[None, None] if positions is None else positions
        plain = self._turned(x.astype(mx.float32), -where)
        own = take_rows(take_rows(plain, first), guide[..., OWNER[self.side]])
        gamma = factors(plain, own)
        codes["owner"] = mx.take_along_axis(guide[..., OWNER[self.side]], rest, axis=-1).astype(place_dtype(k))
        codes["gamma"] = mx.take_along_axis(gamma, rest, axis=-1)
        count = self.plan.slots(n, h, positions is not None)[self.side]
        if count:
            held = guide[..., RESIDUAL[self.side]]
            codes["slots"] = pack(mx.pad(held.astype(mx.uint8), [(0, 0), (0, 0), (0, -n % 32)]), 1)
            left = (plain - gamma.astype(mx.float32)[..., None] * own).reshape(b, 1, h * n, -1)
            flat = held.reshape(b, h * n)
            index = mx.argsort(mx.where(flat > 0, 0, h * n) + mx.arange(h * n, dtype=mx.int32), axis=-1)[
                :, None, :count
            ]
            codes |= self.residuals.encode(take_rows(left, index))
        return codes

    def rows(self, codes: Codes, start: int, stop: int, dtype: mx.Dtype = mx.float32) -> mx.array:
        anchors = codes["anchors"]
        b, h, k, _ = anchors.shape
        n, m = self.n_tokens(codes), stop - start
        if k == n:
            return cast(anchors[:, :, start:stop], dtype)
        tail, at = min(self.plan.window, n), mx.arange(start, stop, dtype=mx.int32)
        newest = at - (n - tail) + (k - tail)  # their rank among the anchors; below k - tail for older rows
        before, listed = mx.zeros((1, 1, m), mx.int32), mx.zeros((1, 1, m), mx.bool_)
        places = mx.arange(n - tail, n, dtype=mx.int32)[None, None]
        if "places" in codes:
            early = codes["places"].astype(mx.int32)
            before = (early[:, :, None] < at[:, None]).sum(axis=-1).astype(mx.int32)
            listed = (early[:, :, None] == at[:, None]).any(axis=-1)
            places = mx.concatenate([early, mx.broadcast_to(places, (b, h, tail))], axis=-1)
        late = at >= n - tail
        rank = mx.where(late, newest, before)
        exact = mx.broadcast_to(late | listed, (b, h, m))
        other = mx.broadcast_to(mx.clip(at - before, 0, n - k - 1), (b, h, m))
        own = mx.where(exact, rank, mx.take_along_axis(codes["owner"], other, axis=-1).astype(mx.int32))
        gamma = mx.take_along_axis(codes["gamma"], other, axis=-1).astype(mx.float32)
        where = codes.get("positions")
        mine = at[None, None] if where is None else where[..., start:stop]
        if where is not None:
            places = mx.take_along_axis(where, mx.broadcast_to(places, (b, h, k)), axis=-1)
        plain = gamma[..., None] * take_rows(self._turned(anchors.astype(mx.float32), -places), own)
        if "slots" in codes:
            plain = plain + self._residual(codes, start, stop)
        return cast(mx.where(exact[..., None], take_rows(anchors, own), self._turned(plain, mine)), dtype)

    def _residual(self, codes: Codes, start: int, stop: int) -> mx.array:
        """Residuals ``(B, H, stop - start, D)`` in float32, zeros where none is held."""
        b, h, _ = codes["slots"].shape
        bits = unpack(codes["slots"], 1).astype(mx.int32)
        rank = (mx.cumsum(bits.reshape(b, -1), axis=-1) - 1).reshape(bits.shape)[..., start:stop]
        kept = {name: codes[name] for name in self.residuals.layout}
        taken = self.residuals.take(kept, mx.maximum(rank, 0).reshape(b, 1, -1))
        assert taken is not None, "residuals are coded one by one"
        rows = self.residuals.decode(taken).reshape(b, h, stop - start, -1)
        return mx.where(bits[..., start:stop, None] > 0, rows, 0.0)

    def _turned(self, x: mx.array, positions: mx.array) -> mx.array:
        return x if self.rope is None else self.rope.turn(x, positions)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        query, parts = q.astype(compute_dtype(q.dtype)), []
        for start, stop in self._spans(codes):
            rows = self.rows(after(codes, parts[-1:]), start, stop, query.dtype)
            parts.append(query @ rows.swapaxes(-1, -2))
        return mx.concatenate(parts, axis=-1).astype(q.dtype)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        weights, sums = p.astype(compute_dtype(p.dtype)), []
        for start, stop in self._spans(codes):
            rows = self.rows(after(codes, sums[-1:]), start, stop, weights.dtype)
            part = (weights[..., start:stop] @ rows).astype(mx.float32)
            sums.append(part if not sums else sums[-1] + part)
        return sums[-1].astype(p.dtype)

    def _spans(self, codes: Codes) -> list[tuple[int, int]]:
        n = self.n_tokens(codes)
        return [(start, min(start + TILE, n)) for start in range(0, n, TILE)]
