"""Bytes of palu with a basis of the sequence's own."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from veloxquant_mlx.cache.store import GROW
from veloxquant_mlx.core.types import SEAL


def row_bytes(latents: int, bits: tuple[int, int] = (4, 2), share: float = 0.25, group: int = 32) -> int:
    """A token of a group of heads: whole bytes of codes per tier, two float16 per ``group`` of its latents."""
    first = latents if bits[0] == bits[1] else ceil(latents * share)
    tiers = zip(bits, (first, latents - first), strict=True)
    return sum(2 * n if b == 16 else ceil(n * b / 8) + 4 * ceil(n / group) for b, n in tiers)


def palu(rank: int, groups: int) -> Callable[[int, tuple[int, int, int, int], int], int]:
    """``rank`` latents per head of the largest group, in all groups, and a float16 basis, from 4 tokens for each on."""

    def held(tokens: int, shape: tuple[int, int, int, int], itemsize: int) -> int:
        b, h, *dims = shape
        count = min(groups, h)
        latents = -(-h // count) * rank
        if tokens <= 4 * latents:
            return b * h * tokens * sum(dims) * itemsize
        n = tokens // SEAL * SEAL
        room = -(-n // GROW) * GROW
        waiting = h * (tokens - n) * sum(dims) * itemsize
        return b * (2 * count * room * row_bytes(latents) + h * sum(dims) * latents * 2 + waiting)

    return held
