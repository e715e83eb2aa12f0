"""Coordinates of rows on the principal axes of their head, each with bits of its own.

What SpectralQuant (Gopinath et al., 2026) and KVTC (Staniszewski, Lancucki, arXiv 2511.01815) share: axes fitted per
head, one float16 size per row, and for every axis levels of Lloyd and Max at the spread that it has over the rows of
the fit. [design] Bits are given to the first, second, … axis of all heads of a layer alike, so that rows of every head
have the same layout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ..transforms.rotation import haar
from .allocation import MOST_BITS, normal_errors
from .base import F16_MAX, Axis, Codec, Codes, Symbols, cast, compute_dtype
from .basis import principal_axes, row_rms, sampled
from .codebook import Nearest
from .levels import lloyd_max
from .packing import lookup, lookup_table, pack, row_multiple, to_bytes, to_words, unpack
from .sketch import SignSketch

FLOOR = 1e-6  # least share of the mean square of a row that an axis counts with
TINY = 1e-30
PAIR_BITS = 4

Allocate = Callable[[np.ndarray], np.ndarray]
"""Bits ``(D,)`` for squared errors ``(D, 9)`` of the axes with 0 to 8 bits."""


class Levels:
    """Lloyd-Max codes of normal coordinates ``(B, H, n, c)`` as rows of bytes."""

    def __init__(self, bits: int) -> None:
        self.bits, levels = bits, lloyd_max(bits).astype(np.float32)
        self._nearest = Nearest((levels[1:] + levels[:-1]) / 2, bits)
        # Tables of pairs are twice as fast and too large for many bits, which few axes have.
        self._pairs = lookup_table(levels, bits) if bits <= PAIR_BITS else None
        self._levels = mx.array(levels)
        mx.eval(self._levels)

    def pack(self, z: mx.array) -> mx.array:
        codes, n = self._nearest(z), z.shape[-1]
        codes = mx.pad(codes, [(0, 0)] * (z.ndim - 1) + [(0, -n % row_multiple(self.bits))])
        return to_bytes(pack(codes, self.bits), n, self.bits)

    def unpack(self, rows: mx.array, n: int) -> mx.array:
        words = to_words(rows, self.bits)
        if self._pairs is not None:
            return lookup(words, self.bits, self._pairs)[..., :n]
        codes = unpack(words, self.bits, n)
        return mx.take_along_axis(self._levels, codes.reshape(-1), axis=0).reshape(codes.shape)

    def error(self, z: mx.array) -> mx.array:
        """Mean squared error ``(B, H, c)`` of coding ``z``."""
        n = z.shape[-1]
        return mx.square(self.unpack(self.pack(z), n) - z).mean(axis=2)


class PrincipalLevels(Codec):
    """``x ~ mean + rms * sum_i spread_i level_i axis_i``; axes with more bits come first, those without are left out.

    ``allocate`` turns errors into bits, out of ``choices``. Fitted arrays: ``basis`` float32 ``(B, H, D, k)`` and
    ``spread`` float32 ``(B, H, k)`` of the ``k`` axes that have bits, ``bits`` uint8 ``(B, H, D)`` by falling spread,
    the same in every head, and with ``centred`` the ``mean`` float32 ``(B, H, 1, D)``.

    Codes: ``rms`` float16 ``(B, H, n)`` of the row without the mean, and for every width ``b`` in use ``w<b>`` uint8
    ``(B, H, n, bytes)``; with a ``sketch`` (keys) of the first axes' error also ``signs`` uint8 ``(B, H, n, bytes)``
    and ``sizes`` float16 ``(B, H, n)``.
    """

    centred = False

    def __init__(
        self, dim: int, allocate: Allocate, choices: tuple[int, ...], *, fit_rows: int, sketch: SignSketch | None = None
    ) -> None:
        self.dim, self.fit_rows, self._allocate, self._sketch = dim, fit_rows, allocate, sketch
        self._tables = {bits: Levels(bits) for bits in sorted(choices, reverse=True) if bits}
        self.layout = {"rms": Axis(-1, 1)}
        self.symbols = {f"w{bits}": Symbols(bits, per_channel=True) for bits in self._tables}
        self._fitted: Codes = {}
        self._sections: list[tuple[Levels, int]] = []
        self._sketched: list[int] = []

    # ------------------------------------------------------------------------------------------------------- fitting

    def learn(self, x: mx.array) -> Codes:
        """What rows ``(B, H, n, D)`` teach, apart from bits: ``basis``, ``spread``, ``errors`` and maybe ``mean``.

        Axes by falling ``spread`` ``(B, H, D)``, the root mean square of their coordinate in units of the row's rms;
        ``errors`` ``(D, 9)`` float32 in squares of the same unit, averaged over heads.
        """
        x = sampled(x)
        learned = {"mean": x.mean(axis=2, keepdims=True)} if self.centred else {}
        rows = x - learned["mean"] if self.centred else x
        unit = rows / mx.maximum(row_rms(rows), TINY)
        basis = self._axes(rows, unit)
        y = unit @ basis
        spread = mx.sqrt(mx.maximum(mx.square(y).mean(axis=2), FLOOR * self.dim))
        order = mx.argsort(-spread, axis=-1)
        spread = mx.take_along_axis(spread, order, axis=-1)
        basis, y = (mx.take_along_axis(a, mx.broadcast_to(order[:, :, None], a.shape), axis=-1) for a in (basis, y))
        return learned | {"basis": basis, "spread": spread, "errors": self._errors(y, spread)}

    def _axes(self, rows: mx.array, unit: mx.array) -> mx.array:
        return principal_axes(unit)[0]

    def _errors(self, y: mx.array, spread: mx.array) -> mx.array:
        return mx.square(spread).mean((0, 1))[:, None] * mx.array(normal_errors(np.ones(1)).astype(np.float32))

    def arrange(self, learned: Codes) -> Codes:
        """The fitted arrays: bits for what was learned, axes in the order of their bits."""
        bits = self._allocate(np.array(learned["errors"], np.float64))
        order = np.argsort(-bits.astype(np.int32), kind="stable")[: np.count_nonzero(bits)]
        # Row by row in memory: products of the same numbers in another order of memory round otherwise.
        fitted = {n: mx.contiguous(mx.take(learned[n], mx.array(order), axis=-1)) for n in ("basis", "spread")}
        heads = learned["basis"].shape[:2]
        fitted["bits"] = mx.contiguous(mx.broadcast_to(mx.array(bits.astype(np.uint8)), (*heads, self.dim)))
        return fitted | {name: learned[name] for name in ("mean",) if name in learned}

    def fit(self, x: mx.array) -> Codes:
        return self.arrange(self.learn(x))

    def bind(self, fitted: Codes) -> PrincipalLevels:
        """This codec with the axes of ``fit`` or ``arrange``; reads the bits, once."""
        bound, bits = copy.copy(self), np.array(fitted["bits"][0, 0]).astype(np.int32)
        bound._fitted, bound.fit_rows = fitted, 0
        bound._sections = [(t, n) for width, t in self._tables.items() if (n := int((bits == width).sum()))]
        layout = {**self.layout, **{f"w{table.bits}": Axis(-2, 1) for table, _ in bound._sections}}
        if self._sketch is not None:
            order = np.argsort(-bits, kind="stable")
            bound._sketched = np.flatnonzero(order < self._sketch.dim).tolist()
            layout |= {"signs": Axis(-2, 1), "sizes": Axis(-1, 1)}
        bound.layout = layout
        return bound

    # --------------------------------------------------------------------------------------------------------- codes

    def encode(self, x: mx.array) -> Codes:
        rows = x.astype(mx.float32)
        rows = rows - self._fitted["mean"] if self.centred else rows
        rms, spread = row_rms(rows), self._fitted["spread"][:, :, None]
        z = (rows / mx.maximum(rms, TINY)) @ self._fitted["basis"] / spread
        codes: Codes = {"rms": mx.minimum(rms[..., 0], F16_MAX).astype(mx.float16)}
        at = 0
        for table, n in self._sections:
            codes[f"w{table.bits}"] = table.pack(z[..., at : at + n])
            at += n
        if self._sketch is not None:
            error = self._leading((z - self._levels(codes)) * spread)
            signs, sizes = self._sketch.encode(error).values()
            codes |= {"signs": to_bytes(signs, self._sketch.m, 1), "sizes": sizes}
        return codes

    def _leading(self, y: mx.array) -> mx.array:
        return mx.take(y, mx.array(self._sketched), axis=-1)

    def _levels(self, codes: Codes) -> mx.array:
        """Levels ``(B, H, n, k)`` in float32, in units of the spread."""
        parts = [table.unpack(codes[f"w{table.bits}"], n) for table, n in self._sections]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def _signs(self, codes: Codes) -> Codes:
        assert self._sketch is not None
        return {"signs": to_words(codes["signs"], 1), "sizes": codes["sizes"]}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        y = self._levels(codes) * self._fitted["spread"][:, :, None]
        if self._sketch is not None:
            y = y.at[..., mx.array(self._sketched)].add(self._sketch.decode(self._signs(codes)))
        rows = (y @ self._fitted["basis"].swapaxes(-1, -2)) * codes["rms"].astype(mx.float32)[..., None]
        return cast(rows + self._fitted["mean"] if self.centred else rows, dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        wide = q.astype(mx.float32)
        turned = wide @ self._fitted["basis"]
        z = (turned * self._fitted["spread"][:, :, None]).astype(compute_dtype(q.dtype))
        dots = self.tiled_scores(z, codes, lambda tile: self._levels(tile).astype(z.dtype)).astype(mx.float32)
        if self._sketch is not None:
            dots = dots + self._sketch.scores(self._leading(turned), self._signs(codes))
        dots = dots * codes["rms"].astype(mx.float32)[..., None, :]
        if self.centred:
            dots = dots + wide @ self._fitted["mean"].swapaxes(-1, -2)
        return dots.astype(q.dtype)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        assert self._sketch is None, "a sketch is for scores"
        wide = p.astype(mx.float32)
        weights = (wide * codes["rms"].astype(mx.float32)[..., None, :]).astype(compute_dtype(p.dtype))
        mixed = self.tiled_mix(weights, codes, lambda tile: self._levels(tile).astype(weights.dtype))
        out = (mixed * self._fitted["spread"][:, :, None]) @ self._fitted["basis"].swapaxes(-1, -2)
        if self.centred:
            out = out + wide.sum(-1, keepdims=True) * self._fitted["mean"]
        return out.astype(p.dtype)


class SpectralLevels(PrincipalLevels):
    """Axes of the rows' directions, not centred; a random rotation, all axes alike, on fewer than ``least`` rows."""

    def __init__(
        self,
        dim: int,
        allocate: Allocate,
        choices: tuple[int, ...],
        *,
        fit_rows: int = 0,
        least: int = 0,
        seed: int = 0,
        tag: int = 0,
        sketch: SignSketch | None = None,
    ) -> None:
        super().__init__(dim, allocate, choices, fit_rows=fit_rows, sketch=sketch)
        self._least, self._seed = least, (seed, tag)

    def learn(self, x: mx.array) -> Codes:
        if x.shape[2] >= self._least:
            return super().learn(x)
        b, h, _, dim = x.shape
        basis = mx.array(haar(dim, *self._seed).astype(np.float32))  # made when needed: it is then a fitted array
        spread = mx.ones((b, h, dim))
        return {
            "basis": mx.broadcast_to(basis, (b, h, dim, dim)),
            "spread": spread,
            "errors": self._errors(spread, spread),
        }


class TransformLevels(PrincipalLevels):
    """Axes of the centred rows; errors are measured on them, or ``spread^2 beta^-bits`` on fewer than ``least``."""

    centred = True

    def __init__(
        self,
        dim: int,
        allocate: Allocate,
        choices: tuple[int, ...],
        *,
        fit_rows: int = 0,
        least: int = 0,
        beta: float = 3.5,
    ) -> None:
        super().__init__(dim, allocate, choices, fit_rows=fit_rows)
        self._least, self._beta = least, beta

    def _axes(self, rows: mx.array, unit: mx.array) -> mx.array:
        return principal_axes(rows)[0]

    def _errors(self, y: mx.array, spread: mx.array) -> mx.array:
        power = mx.square(spread)
        if y.shape[2] < self._least:
            return power.mean((0, 1))[:, None] * self._beta ** -mx.arange(MOST_BITS + 1, dtype=mx.float32)
        z = y / spread[:, :, None]
        columns = [power.mean((0, 1))]
        for bits in range(1, MOST_BITS + 1):
            table = self._tables.get(bits)
            measured = power if table is None else power * table.error(z)
            columns.append(measured.mean((0, 1)))
        return mx.stack(columns, axis=-1)
