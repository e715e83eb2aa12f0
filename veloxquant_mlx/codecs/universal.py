"""Vector codebooks for normal numbers: what every model's keys and values are like once they are normalised.

The codebooks of NSNQuant's default setting are shipped (``tools/universal_codebooks.py`` makes them).
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import numpy as np

from .product import kmeans

SHIPPED = "universal_codebooks.npy"  # of seed 1234, float16 (2, 256, 8): for magnitudes, and with signs
SEED, COUNT, DIM = 1234, 256, 8
SWEEPS = 50


def trained(count: int, dim: int, magnitudes: bool, seed: int, refine: int = 0) -> np.ndarray:
    """Euclidean k-means of standard normal vectors ``(count, dim)``, or of their magnitudes; in float16.

    On 256 vectors per entry, 65536 at most but 4 per entry at least, and then on ``refine`` others.
    """
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))

    def some(n: int) -> np.ndarray:
        x = rng.standard_normal((n, dim), dtype=np.float32)
        return np.abs(x) if magnitudes else x

    centres = kmeans(some(max(min(256 * count, 1 << 16), 4 * count)), count, SWEEPS, seed)
    if refine:
        centres = kmeans(some(refine), count, SWEEPS, seed, start=centres)
    return centres.astype(np.float16)


@cache
def universal_codebook(count: int, dim: int, magnitudes: bool, seed: int) -> np.ndarray:
    """The codebook ``(count, dim)`` float16, shared and read-only; the shipped one for the default setting."""
    if (count, dim, seed) == (COUNT, DIM, SEED):
        with files("veloxquant_mlx.codecs").joinpath(SHIPPED).open("rb") as file:
            book = np.load(file)[0 if magnitudes else 1]
    else:
        book = trained(count, dim, magnitudes, seed)
    book.setflags(write=False)
    return book
