"""Make the codebooks that ``codecs/universal.py`` and ``codecs/vectors.py`` ship; takes minutes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from veloxquant_mlx.codecs import universal, vectors
from veloxquant_mlx.codecs.product import kmeans


def normal(bits: int, dim: int) -> np.ndarray:
    """``2 ** bits`` centres of 40 times as many normal vectors, in float16."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(universal.SEED)))
    x = rng.standard_normal((40 << bits, dim), dtype=np.float32)
    return kmeans(x, 1 << bits, 12, universal.SEED).astype(np.float16)


if __name__ == "__main__":
    here = Path(universal.__file__).parent
    books = [universal.trained(universal.COUNT, universal.DIM, kind, universal.SEED, 1 << 20) for kind in (True, False)]
    np.save(here / universal.SHIPPED, np.stack(books))
    np.save(here / vectors.SHIPPED, normal(12, 4))
