"""The filters of Q-Filters: the main direction of the queries of every head.

Paper: Godey et al., "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression", arXiv:2503.02812.
"""

from __future__ import annotations

import numpy as np

# Below this share of queries on one side, a head has no main direction to speak of.
ANISOTROPIC = 0.6


def query_filters(queries: np.ndarray, kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Filters ``(H, D)`` of queries ``(Hq, M, D)`` after RoPE, and the share ``(Hq,)`` on the positive side; float64.

    Per query head: the first right singular vector of its queries (not centred), turned to the side where more than
    half of them lie. Per kv head: the mean over its query heads, which shrinks where they disagree.
    """
    x = queries.astype(np.float64)
    # The top eigenvector of X^T X: the same vector, from a small matrix.
    u = np.linalg.eigh(x.swapaxes(1, 2) @ x)[1][..., -1]
    positive = (np.einsum("hmd,hd->hm", x, u) > 0).mean(axis=1)
    u = np.where(positive > 0.5, 1.0, -1.0)[:, None] * u
    return u.reshape(kv_heads, -1, u.shape[-1]).mean(axis=1), np.maximum(positive, 1 - positive)
