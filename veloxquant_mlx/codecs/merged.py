"""Rows of several layers as one direction that all of them share and a norm of each (MiniCache, arXiv:2405.14366)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import mlx.core as mx
import numpy as np

from .base import F16_MAX, TILE, Axis, Codec, Codes, after, cast, compute_dtype
from .joint import JointCodec, JointRows

RETAINED = -1.0  # a norm that says: this is the row itself
SMALL_ANGLE = 1e-4  # below it, sin(w) divides by too little: the straight line between the directions is as good
OPPOSED = 1e-3  # unit vectors whose sum is shorter point nowhere together
MOST_RETAINED = 0.5
TINY = 1e-30


class Merged(JointCodec):
    """Per (token, head): a direction in the rows' own dtype for all layers, a float16 norm for each.

    The direction of two layers lies at ``t`` on the arc between theirs; that of more is the mean of theirs, normalised.
    Where two of them have a cosine below ``threshold`` (or all point nowhere together, or a norm does not fit in
    float16) the rows are retained as they are: that of the first layer in the place of the direction, those of the
    others, which alone take more memory for it, in arrays of their own.

    Codes: ``directions`` ``(B, H, n, D)``; ``m<j>.norms`` ``(B, H, n)``, -1 where rows are retained; ``m<j>.exact``
    ``(k, D)`` for j >= 1, the retained rows by token, sequence and head, so that counting them finds each; none where
    k is 0. How many there are must be known, so that ``encode`` waits for the device once.

    With ``fit_rows``, so many rows decide whether merging pays: where more than half of their pairs would be retained,
    all rows stay as they come. ``dtype``: to hold rows in, where they come in a wider one.
    """

    def __init__(
        self,
        threshold: float,
        t: float = 0.5,
        *,
        members: int = 2,
        member: int = 0,
        fit_rows: int = 0,
        dtype: mx.Dtype | None = None,
    ) -> None:
        super().__init__(members, member)
        self.threshold, self.t, self.fit_rows, self.dtype = threshold, t, fit_rows, dtype
        self.layout = {"directions": Axis(2, 1)} | {f"m{j}.norms": Axis(2, 1) for j in range(members)}

    # ------------------------------------------------------------------------------------------------------ encoding

    def fit(self, x: mx.array) -> Codes:
        """The share of pairs in ``x`` that would be retained, a float32 number."""
        return {"retained": self._merged(self.parts(x))[2].astype(mx.float32).mean()}

    def bind(self, fitted: Codes) -> Codec:
        """Waits for the share."""
        share = fitted["retained"].item()
        assert isinstance(share, float)
        if share <= MOST_RETAINED:
            return self
        why = f"rows stay as they came: {share:.0%} of the pairs in the first {self.fit_rows} tokens would be retained"
        return JointRows(self.members, self.member, why, self.dtype)

    def encode(self, x: mx.array) -> Codes:
        rows = self.parts(x if self.dtype is None else cast(x, self.dtype))
        direction, norms, kept = self._merged(rows)
        codes = {"directions": mx.where(kept[..., None], rows[0], direction.astype(rows[0].dtype))}
        for j, norm in enumerate(norms):
            codes[f"m{j}.norms"] = mx.where(kept, RETAINED, norm).astype(mx.float16)
        index = np.flatnonzero(np.array(kept.transpose(2, 0, 1)))  # waits
        if index.size:
            where = mx.array(index.astype(np.int32))
            for j, own in enumerate(rows[1:], start=1):
                codes[f"m{j}.exact"] = mx.take(own.transpose(2, 0, 1, 3).reshape(-1, own.shape[3]), where, axis=0)
        return codes

    def _merged(self, rows: list[mx.array]) -> tuple[mx.array, list[mx.array], mx.array]:
        """Directions ``(B, H, n, D)`` and norms ``(B, H, n)`` in float32, and which pairs are to be retained."""
        wide = [part.astype(mx.float32) for part in rows]
        norms = [_norm(part) for part in wide]
        units = [part / mx.maximum(n, TINY)[..., None] for part, n in zip(wide, norms, strict=True)]
        # A row of zeros is any direction times zero: it takes that of another layer.
        other = units[0]
        for unit in units[1:]:
            other = mx.where(_norm(other)[..., None] > 0, other, unit)
        units = [mx.where(n[..., None] > 0, unit, other) for unit, n in zip(units, norms, strict=True)]
        kept = _norm(sum(units[1:], start=units[0])) < OPPOSED
        for a, b in combinations(units, 2):
            kept = kept | ((a * b).sum(-1) < self.threshold)
        for n in norms:
            kept = kept | (n > F16_MAX)
        return self._between(units), norms, kept

    def _between(self, units: list[mx.array]) -> mx.array:
        """The direction that stands for all of ``units``."""
        if len(units) == 2:
            u, v = units
            # In place of the arc cosine, which has no digits left for small angles.
            w = 2 * mx.arctan2(_norm(u - v), _norm(u + v))[..., None]
            small = w < SMALL_ANGLE
            over = mx.where(small, 1.0, mx.sin(w))
            a = mx.where(small, 1 - self.t, mx.sin((1 - self.t) * w) / over)
            total = a * u + mx.where(small, self.t, mx.sin(self.t * w) / over) * v
        else:
            total = sum(units[1:], start=units[0])
        return total / mx.maximum(_norm(total), TINY)[..., None]

    # ------------------------------------------------------------------------------------------------------- reading

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return self.rows(codes, 0, self.n_tokens(codes), dtype)

    def rows(self, codes: Codes, start: int, stop: int, dtype: mx.Dtype = mx.float32) -> mx.array:
        rows, factor = self._reader(codes)(codes, start, stop)
        return cast(rows.astype(mx.float32) * factor.astype(mx.float32)[..., None], dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        query = q.astype(compute_dtype(q.dtype))
        read, parts = self._reader(codes), []
        for start, stop in self._steps(codes, query.dtype):
            rows, factor = read(after(codes, parts[-1:]), start, stop)
            part = query @ rows.astype(query.dtype).swapaxes(-1, -2)
            parts.append(part * factor.astype(query.dtype)[:, :, None])
        return mx.concatenate(parts, axis=-1).astype(q.dtype)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        weights = p.astype(compute_dtype(p.dtype))
        read, sums = self._reader(codes), []
        for start, stop in self._steps(codes, weights.dtype):
            rows, factor = read(after(codes, sums[-1:]), start, stop)
            part = weights[..., start:stop] * factor.astype(weights.dtype)[:, :, None]
            part = (part @ rows.astype(weights.dtype)).astype(mx.float32)
            sums.append(sums[-1] + part if sums else part)
        return sums[-1].astype(p.dtype)

    def _reader(self, codes: Codes) -> Callable[[Codes, int, int], tuple[mx.array, mx.array]]:
        """A function that gives rows ``start`` to ``stop`` of codes like these, and the factors that belong to them."""
        own, exact = self.own("norms"), self.own("exact")
        places = _places(codes[own]) if exact in codes else None

        def read(codes: Codes, start: int, stop: int) -> tuple[mx.array, mx.array]:
            rows, norms = codes["directions"][:, :, start:stop], codes[own][:, :, start:stop]
            kept = norms < 0
            if places is not None:
                rows = mx.where(kept[..., None], mx.take(codes[exact], places[:, :, start:stop], axis=0), rows)
            return rows, mx.where(kept, 1, norms)

        return read

    def _steps(self, codes: Codes, dtype: mx.Dtype) -> list[tuple[int, int]]:
        """Tiles; one of everything where rows are multiplied where they lie."""
        n = self.n_tokens(codes)
        step = n if codes["directions"].dtype == dtype and self.own("exact") not in codes else TILE
        return [(start, min(start + step, n)) for start in range(0, n, step)]

    # -------------------------------------------------------------------------------------------------------- moving

    def cut(self, codes: Codes, start: int, stop: int) -> Codes:
        """Waits for the number of retained rows where there are any."""
        out = super().cut(codes, start, stop)
        if more := codes.keys() - self.layout.keys():
            kept = codes["m0.norms"] < 0
            low, high = (int(n) for n in np.array(mx.stack([kept[:, :, :end].sum() for end in (start, stop)])))
            out |= {name: codes[name][low:high] for name in more if low < high}
        return out

    def take(self, codes: Codes, index: mx.array) -> Codes | None:
        return None  # single rows cannot leave: layers keep the same tokens

    def remarks(self, codes: Codes) -> tuple[str, ...]:
        norms = codes["m0.norms"]
        kept, merged = (int(n) for n in np.array(mx.stack([(norms < 0).sum(), (norms > 0).sum()])))
        total = max(kept + merged, 1)
        return (f"retention rate {kept / total:.1%}: of {total:,} (token, head) pairs {merged:,} are merged",)


def _norm(x: mx.array) -> mx.array:
    """The length of the last axis."""
    return mx.sqrt(mx.square(x).sum(-1))


def _places(norms: mx.array) -> mx.array:
    """Where the exact row of each retained one lies, ``(B, H, n)`` int32; elsewhere some place that there is."""
    kept = (norms < 0).reshape(-1, norms.shape[2]).astype(mx.int32)
    within = mx.cumsum(kept, axis=0)
    of_token = within[-1]
    return mx.maximum(mx.cumsum(of_token) - of_token + within - 1, 0).reshape(norms.shape)
