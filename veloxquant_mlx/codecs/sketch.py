"""Signs of random projections: one bit per projection, and dot products without bias over the choice of projections.

Paper: Zandieh, Daliri, Han, "QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero Overhead",
arXiv 2406.03482. [design] Orthogonal projections, with their own exact constant, instead of independent ones: for
vectors that are nearly orthogonal the variance falls from pi/2 to pi/2 - 1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from scipy import special

from ..core.exceptions import QuantizerConfigError
from ..core.types import is_int
from ..transforms.rotation import haar, stored_seed
from .base import F16_MAX, Axis, Codec, Codes, Readable, cast, compute_dtype
from .packing import level_array, pack, padded
from .tables import PackedDots

if TYPE_CHECKING:
    from ..core.abstractions import ArtifactStore


def sketch_constant(dim: int, orthogonal: bool = True) -> float:
    """What ``|k| / m * <S q, sign(S k)>`` must be multiplied by to be ``<q, k>`` on average over ``S``.

    ``sqrt(pi / 2)`` for independent normal rows, slightly less for orthogonal rows of norm ``sqrt(dim)``, which every
    row of the papers' matrices has only on average.
    """
    if not orthogonal:
        return float(np.sqrt(np.pi / 2))
    return float(np.sqrt(np.pi / dim) * np.exp(special.gammaln((dim + 1) / 2) - special.gammaln(dim / 2)))


@lru_cache(maxsize=256)
def _fresh(dim: int, rows: int, seed: int, tag: int) -> mx.array:
    # Blocks of dim rows; the streams of the blocks are apart from those of other tags, which are small.
    blocks = [haar(dim, seed, tag + (i << 8)) for i in range(-(-rows // dim))]
    matrix = mx.array((np.concatenate(blocks)[:rows] * np.sqrt(dim)).astype(np.float32))
    mx.eval(matrix)
    return matrix


def projections(dim: int, rows: int, seed: int, tag: int, store: ArtifactStore | None = None) -> mx.array:
    """``rows`` random projections ``(rows, dim)`` in float32, in blocks of ``dim`` orthogonal ones of norm sqrt(dim).

    The same on every back end. With a ``store`` the matrix kept there is used, or the fresh one is saved (kind "jl").
    """
    if not is_int(rows) or rows < 1:
        raise QuantizerConfigError(f"rows={rows!r}: must be an int of at least 1, for example the head size {dim}")
    if store is None:
        return _fresh(dim, rows, seed, tag)
    key = stored_seed(seed, tag)
    if not store.exists("jl", d=dim, m=rows, seed=key):
        store.save_jl_matrix(_fresh(dim, rows, seed, tag), dim, rows, key)
        return _fresh(dim, rows, seed, tag)
    kept = mx.array(store.load_jl_matrix(dim, rows, key)).astype(mx.float32)
    if kept.shape != (rows, dim) or not _orthogonal(np.array(kept, dtype=np.float64)):
        raise QuantizerConfigError(
            f"store: the projections kept for d={dim}, m={rows}, seed={key} are not {rows} x {dim} in orthogonal "
            "blocks. Remove them from the store; they are then made again."
        )
    return kept


def _orthogonal(matrix: np.ndarray) -> bool:
    dim = matrix.shape[1]
    blocks = (matrix[i : i + dim] for i in range(0, len(matrix), dim))
    return all(np.allclose(b @ b.T, dim * np.eye(len(b)), atol=1e-3 * dim) for b in blocks)


class SignSketch(Codec):
    """The signs of ``matrix`` ``(m, D)`` times a row, and the rms of the row in float16.

    Codes: ``signs`` uint32 ``(B, H, n, padded_m / 32)`` with bit 1 for projections of zero and more, ``sizes`` float16
    ``(B, H, n)``. Scores are unbiased over the choice of the matrix, with variance ``(pi/2 - 1) |q|^2 |k|^2 / m`` for
    orthogonal blocks and ``(pi/2 |q|^2 |k|^2 - <q, k>^2) / m`` for independent rows (``orthogonal=False``); for one
    matrix the errors of all rows are related, so that averaging over rows does not remove them. The query is
    projected in float32 and not quantised.
    """

    def __init__(self, matrix: mx.array, orthogonal: bool = True) -> None:
        self.matrix = matrix
        self.m, self.dim = matrix.shape
        self.padded_m = padded(self.m, 32)
        # rms instead of norm
        self.weight = sketch_constant(self.dim, orthogonal) * self.dim**0.5 / self.m
        self.layout = {"signs": Axis(-2, 1), "sizes": Axis(-1, 1)}
        signs = np.array([-1.0, 1.0], dtype=np.float32)
        self._dots, self._levels = PackedDots(signs, 1, fused=None), level_array(signs)

    def encode(self, x: mx.array) -> Codes:
        x = x.astype(mx.float32)
        positive = x @ self.matrix.T >= 0
        if self.padded_m > self.m:
            positive = mx.pad(positive, [(0, 0)] * (x.ndim - 1) + [(0, self.padded_m - self.m)])
        size = mx.sqrt((x * x).mean(-1))
        return {"signs": pack(positive, 1), "sizes": mx.minimum(size, F16_MAX).astype(mx.float16)}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        rows = self._dots.values(codes["signs"])[..., : self.m] @ self.matrix
        return cast(rows * (codes["sizes"].astype(mx.float32) * self.weight)[..., None], dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        work = compute_dtype(q.dtype)
        # The projections are weighted before they are cast, so that sums of m terms stay within float16.
        dots = self._dots(self._project(q).astype(work), codes["signs"])
        return (dots.astype(mx.float32) * codes["sizes"].astype(mx.float32)[..., None, :]).astype(q.dtype)

    def _project(self, q: mx.array) -> mx.array:
        """Weighted projections ``(B, H, R, padded_m)`` of queries, in float32."""
        query = (q.astype(mx.float32) @ self.matrix.T) * self.weight
        spare = self.padded_m - self.m
        return mx.pad(query, [(0, 0)] * (q.ndim - 1) + [(0, spare)]) if spare else query

    def readable(self, codes: Codes) -> Readable | None:
        plain = Readable("codebook", 1, self.padded_m, codes["signs"], codes["sizes"], table=self._levels)
        return plain.behind(self._project, lambda y: y[..., : self.m] @ (self.matrix * self.weight))


class Sketched(Codec):
    """``base``, and a sign sketch of what it misses: unbiased scores (the inner-product variant of TurboQuant).

    Codes: those of ``base``, and ``signs`` and ``sizes`` of the error. The error counts from the decoded row, so the
    rounding of the base's norm is part of it. Paper: TurboQuant, arXiv 2504.19874.
    """

    def __init__(self, base: Codec, sketch: SignSketch) -> None:
        assert base.block == 1 and not base.fit_rows, "rows are coded one by one"
        self.base, self.sketch = base, sketch
        self.layout = {**base.layout, **sketch.layout}

    def encode(self, x: mx.array) -> Codes:
        x = x.astype(mx.float32)
        codes = self.base.encode(x)
        return codes | self.sketch.encode(x - self.base.decode(codes))

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return cast(self.base.decode(codes) + self.sketch.decode(codes), dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        return self.base.scores(q, codes) + self.sketch.scores(q, codes)

    def readable(self, codes: Codes) -> Readable | None:
        base = self.base.readable(codes)
        return None if base is None else base._replace(sketch=self.sketch.readable(codes))
