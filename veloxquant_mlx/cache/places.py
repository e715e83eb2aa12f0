"""Which token each row of a layer is: what the store of a layer and its two streams know together."""

from __future__ import annotations

import mlx.core as mx


class Places:
    """``positions`` int32 ``(B | 1, H | 1, n)``, None while row i is the token at position i; -1 marks holes.

    ``protected`` are positions, int32 ``(B, 1, m)``, of tokens that stay exact once they are packed (``cache.exact``);
    in the order of the positions, then NOBODY. None without such tokens.

    An object of its own, because a stream that pointed back at its store would keep both, and all their arrays, alive
    until Python looks for cycles.
    """

    def __init__(self) -> None:
        self.positions: mx.array | None = None
        self.protected: mx.array | None = None

    def where(self, start: int, stop: int) -> mx.array:
        """Positions ``(B | 1, H | 1, stop - start)`` int32 of rows ``start`` to ``stop``; -1 marks holes."""
        if self.positions is None:
            return mx.arange(start, stop, dtype=mx.int32)[None, None]
        return self.positions[..., start:stop]
