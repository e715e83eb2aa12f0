"""Random rotations of the head dimension, the same on every back end for the same seed."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..core.exceptions import QuantizerConfigError
from ..core.types import is_int
from .base import Transform

if TYPE_CHECKING:
    from ..core.abstractions import ArtifactStore


class Rotation(Transform):
    """Rows times the transpose of an orthogonal ``matrix`` ``(D, D)``."""

    def __init__(self, matrix: mx.array) -> None:
        self.matrix = matrix.astype(mx.float32)
        mx.eval(self.matrix)

    def forward(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32) @ self.matrix.T

    def inverse(self, y: mx.array) -> mx.array:
        return y.astype(mx.float32) @ self.matrix


class RandomHadamard(Transform):
    """Random signs ``(D,)``, then the Hadamard transform: one rotation in ``D log D`` operations."""

    def __init__(self, signs: mx.array) -> None:
        self.signs = signs.astype(mx.float32)
        mx.eval(self.signs)

    def forward(self, x: mx.array) -> mx.array:
        return mx.hadamard_transform(x.astype(mx.float32) * self.signs)

    def inverse(self, y: mx.array) -> mx.array:
        return mx.hadamard_transform(y.astype(mx.float32)) * self.signs


@cache
def hadamard_is_safe(dim: int) -> bool:
    """Whether ``mx.hadamard_transform`` is orthogonal and its own inverse at this size.

    True for ``2**k`` and ``12 * 2**k``. The families of 20 and 28 are orthogonal but not symmetric, and sizes that MLX
    does not know give numbers without meaning and without an error.
    """
    odd = dim // (dim & -dim)
    if odd not in (1, 3) or (odd == 3 and dim % 12) or dim < 2:
        return False
    h = np.array(mx.hadamard_transform(mx.eye(dim)), dtype=np.float64)
    # float32 butterflies: log2(D) roundings of numbers below one
    return bool(np.allclose(h @ h.T, np.eye(dim), atol=1e-5) and np.allclose(h, h.T, atol=1e-6))


def generator(seed: int, tag: int) -> np.random.Generator:
    """Random numbers that are the same everywhere; ``tag`` tells independent uses of one seed apart."""
    if not is_int(seed) or seed < 0:
        raise QuantizerConfigError(f"seed={seed!r}: must be an int of at least 0. The default is 42.")
    # A spawn key, as [seed, 0] would give the very numbers of default_rng(seed), with which people make test data.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(tag,))))


def stored_seed(seed: int, tag: int) -> int:
    """The seed under which an artifact store keeps what ``seed`` and ``tag`` make; ``seed`` itself for tag 0."""
    return seed if tag == 0 else int(generator(seed, tag).integers(1 << 32))


def haar(dim: int, seed: int, tag: int = 0) -> np.ndarray:
    """A uniformly random orthogonal matrix ``(dim, dim)`` in float64.

    Without the sign fix the factor of LAPACK is not uniform (Mezzadri 2007, arXiv math-ph/0609050).
    """
    q, r = np.linalg.qr(generator(seed, tag).standard_normal((dim, dim)))
    return q * np.where(np.diag(r) < 0, -1.0, 1.0)


@lru_cache(maxsize=256)
def _fresh(dim: int, seed: int, tag: int) -> Transform:
    if hadamard_is_safe(dim):
        signs = generator(seed, tag).integers(0, 2, size=dim) * 2.0 - 1.0
        return RandomHadamard(mx.array(signs.astype(np.float32)))
    return Rotation(mx.array(haar(dim, seed, tag).astype(np.float32)))


def rotation(dim: int, seed: int, tag: int = 0, store: ArtifactStore | None = None) -> Transform:
    """The rotation of ``dim`` channels for ``seed``; ``tag`` tells independent uses of one seed apart (keys, values).

    Randomised Hadamard where MLX has a self-inverse one, otherwise a Haar matrix. With a ``store`` the matrix kept
    there is used, or the fresh one is saved: under ``seed`` for tag 0 and under a seed derived from both otherwise.
    """
    generator(seed, tag)
    if store is None:
        return _fresh(dim, seed, tag)
    key = stored_seed(seed, tag)
    if store.exists("rotation", d=dim, seed=key):
        matrix = mx.array(store.load_rotation_matrix(dim, key))
        kept = np.array(matrix.astype(mx.float32), dtype=np.float64)
        if kept.shape != (dim, dim) or not np.allclose(kept @ kept.T, np.eye(dim), atol=1e-3):
            raise QuantizerConfigError(
                f"store: the rotation kept for d={dim}, seed={key} is not an orthogonal {dim} x {dim} matrix. "
                "Remove it from the store; it is then made again."
            )
        return Rotation(matrix)
    matrix = _fresh(dim, seed, tag).forward(mx.eye(dim)).T
    mx.eval(matrix)
    store.save_rotation_matrix(matrix, dim, key)
    return Rotation(matrix)
