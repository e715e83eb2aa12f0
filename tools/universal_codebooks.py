"""Make the codebooks that ``veloxquant_mlx/codecs/universal.py`` ships; takes minutes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from veloxquant_mlx.codecs import universal

if __name__ == "__main__":
    books = [universal.trained(universal.COUNT, universal.DIM, kind, universal.SEED, 1 << 20) for kind in (True, False)]
    np.save(Path(universal.__file__).with_name(universal.SHIPPED), np.stack(books))
