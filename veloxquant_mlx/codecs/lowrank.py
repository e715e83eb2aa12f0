"""A small matrix product per head that comes near to rows: ``rows ~ left @ right``, with the rows in blocks.

The low-rank part of GEAR (Kang et al., arXiv 2403.05527).
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .base import F16_MAX, Codes

# Fixed: where the power iteration starts is nothing that a user would want to choose.
SEED = 2403
TINY = 1e-18  # its square is a float32 number


def orthonormal(x: mx.array) -> mx.array:
    """Columns of ``x`` ``(..., D, r)`` made orthonormal one after another: the first ``j`` span what they spanned.

    Gram-Schmidt, every column twice; with matrix products alone, so that a GPU never waits. A column that depends on
    those before it becomes zero: what is left of it is rounding, and no direction.
    """
    done = _unit(x[..., :1], TINY)
    for j in range(1, x.shape[-1]):
        column = _unit(x[..., j : j + 1], TINY)
        for _ in range(2):
            column = _unit(column - done @ (done.swapaxes(-1, -2) @ column), 1e-5)
        done = mx.concatenate([done, column], axis=-1)
    return done


def _unit(column: mx.array, least: float) -> mx.array:
    """``column`` with norm 1; 0 where its norm is below ``least``."""
    norm = mx.sqrt(mx.square(column).sum(-2, keepdims=True))
    return mx.where(norm > least, column / mx.maximum(norm, least), 0.0)


class LowRank:
    """``left`` float16 ``(B, H, n, r)`` and, per block of tokens, ``right`` float16 ``(B, H, n / block, r, D)``.

    ``block=None`` takes all tokens as one block, and with ``energy`` only as many of the ``rank`` components as hold
    that share of the squared sum of every head (which waits for the numbers). A block gets at most a quarter of its
    tokens as rank: beyond that the factors cost more than they help. Products never multiply the factors out.
    """

    def __init__(self, rank: int, block: int | None = None, energy: float | None = None) -> None:
        self.rank, self.block, self.energy = rank, block, energy

    def ranks(self, block: int, dim: int) -> int:
        """Components of a block of ``block`` tokens of ``dim`` channels."""
        return min(self.rank, block // 4, dim)

    def encode(self, x: mx.array) -> Codes:
        """Factors of ``x`` ``(B, H, n, D)`` float32; an empty dict where there is no component.

        The best subspace by power iteration on the Gram matrix, ``(X^T X)^4`` on a seeded start (paper: 3 rounds).
        """
        b, h, n, dim = x.shape
        block = self.block or n
        rank = self.ranks(block, dim)
        if rank == 0:
            return {}
        x = x.reshape(b, h, n // block, block, dim)
        gram = x.swapaxes(-1, -2) @ x
        total = mx.square(x).sum((-2, -1), keepdims=True)
        gram = gram / mx.maximum(total, TINY**2)
        if rank == dim:  # exact: nothing to search for
            basis = mx.broadcast_to(mx.eye(dim), gram.shape)
        else:
            basis = mx.array(np.random.default_rng(SEED).normal(size=(dim, rank)).astype(np.float32))
            for _ in range(2):
                basis = orthonormal(gram @ (gram @ basis))
        basis = basis.astype(mx.float16)
        left = x @ basis.astype(mx.float32)
        if self.energy is not None:
            held = mx.cumsum(mx.square(left).sum(-2), axis=-1)
            short = (held < self.energy * total[..., 0]).sum(-1)
            rank = min(int(np.array(short.max())) + 1, rank)
        left = mx.clip(left[..., :rank], -F16_MAX, F16_MAX).astype(mx.float16)
        return {"left": left.reshape(b, h, n, rank), "right": basis[..., :rank].swapaxes(-1, -2)}

    def add(self, rows: mx.array, codes: Codes) -> mx.array:
        """``rows`` ``(B, H, n, D)`` with the product of the factors added."""
        left, right = _factors(codes)
        return rows + (left @ right).reshape(rows.shape).astype(rows.dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        """What the product adds to the scores: ``(B, H, R, n)`` float32 for ``q`` ``(B, H, R, D)``."""
        left, right = _factors(codes)
        out = (q.astype(mx.float32)[:, :, None] @ right.swapaxes(-1, -2)) @ left.swapaxes(-1, -2)
        return out.swapaxes(2, 3).reshape(*q.shape[:3], -1)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        """What the product adds to the sums under ``p`` ``(B, H, R, n)``: float32 ``(B, H, R, D)``."""
        left, right = _factors(codes)
        b, h, r, _ = p.shape
        weights = p.astype(mx.float32).reshape(b, h, r, left.shape[2], -1).swapaxes(2, 3)
        sums = (weights @ left).swapaxes(2, 3).reshape(b, h, r, -1)
        return sums @ right.reshape(b, h, -1, right.shape[-1])


def _factors(codes: Codes) -> tuple[mx.array, mx.array]:
    """Left ``(B, H, blocks, n / blocks, r)`` and right ``(B, H, blocks, r, D)`` in float32."""
    left, right = codes["left"].astype(mx.float32), codes["right"].astype(mx.float32)
    b, h, _, rank = left.shape
    return left.reshape(b, h, right.shape[2], -1, rank), right
