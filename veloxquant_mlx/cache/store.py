"""The rows of one layer: keys, values, positions, and what policies remember. Written once for every method."""

from __future__ import annotations

import mlx.core as mx

from ..core.types import Recipe
from .exact import NOBODY
from .places import Places
from .rows import GROW
from .stream import PerRow, StreamStore

__all__ = ["GROW", "Store"]


class Store:
    """Keys, values and positions of one layer, and the auxiliary arrays of its policy.

    ``row_aux`` holds arrays ``(B, H, m)`` that belong to the newest ``m`` rows: new rows get zeros, and rows that are
    dropped take their entries along. ``aux`` holds whatever else a policy remembers, ``numbers`` the plain ints among
    that, which are read without waiting for the device.

    A row whose position is -1 is a hole: the padding of a head that keeps fewer rows than others, or a row that was
    dropped and not yet cleared away. Attention must not see holes (``holes`` says that there may be some). One more
    kind of hole never meets attention: the ``vacant`` slot that the next token will fill.
    """

    def __init__(self, recipe: Recipe):
        self.places, self.together = Places(), recipe.together
        self.keys, self.values = (StreamStore(spec, self.places) for spec in (recipe.keys, recipe.values))
        self.vacant: mx.array | None = None
        self.holes = False
        self.dead = 0  # rows per head that were dropped and are still there, the vacant slot left out
        self.aux: dict[str, mx.array] = {}
        self.numbers: dict[str, int] = {}
        self.row_aux: dict[str, mx.array] = {}

    @property
    def positions(self) -> mx.array | None:
        """Positions ``(B | 1, H | 1, n)`` int32; None while row i is the token at position i."""
        return self.places.positions

    @positions.setter
    def positions(self, value: mx.array | None) -> None:
        self.places.positions = value

    @property
    def protected(self) -> mx.array | None:
        """Positions of tokens that stay exact (``cache.places``)."""
        return self.places.protected

    @protected.setter
    def protected(self, value: mx.array | None) -> None:
        self.places.protected = value

    @property
    def n(self) -> int:
        """Rows held, holes included."""
        return self.keys.n

    @property
    def live(self) -> int:
        """Rows per head that were not dropped (where heads keep different numbers: of the longest)."""
        return self.n - self.dead - (self.vacant is not None)

    @property
    def sealed(self) -> bool:
        """Whether any row is held as codes."""
        return bool(self.keys.n_sealed or self.values.n_sealed)

    def positions_or_range(self) -> mx.array:
        """Positions ``(B | 1, H | 1, n)`` int32 of all rows; -1 marks holes."""
        return self.places.where(0, self.n)

    def append(self, keys: mx.array, values: mx.array, start: int) -> None:
        """Add the rows of the tokens from position ``start`` on; a single token fills the vacant slot."""
        count = keys.shape[2]
        if self.vacant is not None and count == 1:
            slot, self.vacant = self.vacant, None
            self.keys.put(keys, slot)
            self.values.put(values, slot)
            assert self.positions is not None
            self.positions = _put(self.positions, slot, start)
            # What only the newest rows have gets one more, as in every append.
            self.row_aux = {
                name: _put(a, slot, 0) if a.shape[-1] == self.n else mx.pad(a, [(0, 0), (0, 0), (0, 1)])
                for name, a in self.row_aux.items()
            }
            return
        if self.vacant is not None:
            self.compact()
        self.keys.append(keys)
        self.values.append(values)
        if self.positions is not None:
            new = mx.arange(start, start + count, dtype=mx.int32)
            new = mx.broadcast_to(new, (*self.positions.shape[:2], count))
            self.positions = mx.concatenate([self.positions, new], axis=-1)
        self.row_aux = {name: mx.pad(a, [(0, 0), (0, 0), (0, count)]) for name, a in self.row_aux.items()}

    def seal(self, rows: PerRow | None = None, ends: bool = False, most: int | None = None) -> int:
        """Encode what has left the windows; returns the number of rows encoded, keys and values together.

        ``rows`` answers what guided codecs get; ``ends``: the first prompt is complete; ``most`` rows do not wait for
        that. Layers that are packed together only say here that they are ready (``cache.joint``).
        """
        if self.together > 1:
            self.numbers |= {"ready": self.n, "ends": int(ends)}
            return 0
        return self.keys.seal(rows, ends, most=most) + self.values.seal(rows, ends, most=most)

    # ------------------------------------------------------------------------------------------------------ dropping

    def keep(self, index: mx.array, valid: mx.array | None = None) -> None:
        """Keep the rows that ``index`` ``(B | 1, H | 1, m)`` names, in that order.

        Where ``valid`` (same shape) is False, the row is padding: its head keeps fewer rows than others.
        """
        positions, self.vacant, self.dead = self.positions_or_range(), None, 0  # what was dropped is not named
        self.keys.keep(index)
        self.values.keep(index)
        self.positions = _gather(positions, index)
        # What only the newest rows have says by its length whose it is: that is lost once rows are chosen.
        n = positions.shape[-1]
        self.row_aux = {name: _gather(a, index) for name, a in self.row_aux.items() if a.shape[-1] == n}
        self.holes = valid is not None
        if valid is not None:
            self.positions = mx.where(valid, self.positions, -1)

    def cut(self, start: int, stop: int) -> None:
        """Drop rows ``start`` to ``stop`` of every head."""
        if self.sealed or self.row_aux:
            self.keep(mx.concatenate([mx.arange(start), mx.arange(stop, self.n)])[None, None])
            return
        old = self.positions_or_range()
        self.keys.cut(start, stop)
        self.values.cut(start, stop)
        self.positions = mx.concatenate([old[..., :start], old[..., stop:]], axis=-1)

    def drop_one(self, index: mx.array, slack: int) -> None:
        """Drop one row per head, ``index`` ``(B | 1, H | 1, 1)``, at a cost that does not grow with the rows held.

        Among float rows the slot becomes vacant for the next token. Codes cannot be overwritten: there the row becomes
        a hole, and holes are cleared away once there are more than ``slack``.
        """
        assert self.vacant is None
        self.positions = _put(self.positions_or_range(), index, -1)
        if not self.sealed:
            self.vacant = index
            return
        self.dead, self.holes = self.dead + 1, True
        if self.dead > slack:
            self.compact()

    def order(self) -> mx.array | None:
        """Rows ``(B | 1, H | 1, m)`` that were not dropped, oldest first; None where none was."""
        gone = self.dead + (self.vacant is not None)
        return mx.argsort(self.positions_or_range(), axis=-1)[..., gone:] if gone else None

    def compact(self) -> None:
        """Clear dropped rows away and put the others in the order of their positions."""
        if (order := self.order()) is not None:
            self.vacant, self.dead, self.holes = None, 0, False
            self.keep(order)

    def truncate(self, n: int) -> None:
        """Keep the oldest ``n`` rows."""
        gone = self.n - n
        self.keys.truncate(n)
        self.values.truncate(n)
        if self.protected is not None:
            self.protected = mx.where(self.protected < n, self.protected, NOBODY)
        self.row_aux = {name: a[..., : max(a.shape[-1] - gone, 0)] * 1 for name, a in self.row_aux.items()}

    # -------------------------------------------------------------------------------------------------------- arrays

    def arrays(self) -> dict[str, mx.array]:
        """Every array that the store keeps alive, by name."""
        out = {f"k.{name}": a for name, a in self.keys.arrays().items()}
        out |= {f"v.{name}": a for name, a in self.values.arrays().items()}
        if self.positions is not None:
            out["positions"] = self.positions
        if self.vacant is not None:
            out["vacant"] = self.vacant
        if self.protected is not None:
            out["protected"] = self.protected
        out |= {f"row.{name}": a for name, a in self.row_aux.items()}
        return out | {f"aux.{name}": a for name, a in self.aux.items()}

    def set_arrays(self, arrays: dict[str, mx.array]) -> None:
        """Put back arrays that ``arrays()`` gave; counts are restored by ``set_counts``."""
        for name, array in arrays.items():
            owner, _, field = name.partition(".")
            if owner in ("positions", "vacant", "protected"):
                setattr(self, owner, array)
            elif owner in ("aux", "row"):
                (self.aux if owner == "aux" else self.row_aux)[field] = array
            else:
                (self.keys if owner == "k" else self.values).set_array(field, array)

    def copy_from(self, other: Store) -> None:
        """Become an independent copy: the arrays are shared until one side writes."""
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            mine.dtype, mine.batch, mine.heads, mine.dim = theirs.dtype, theirs.batch, theirs.heads, theirs.dim
        self.set_arrays({name: mx.array(a) for name, a in other.arrays().items()})
        self.set_counts(other.counts())
        self.numbers = dict(other.numbers)

    def counts(self) -> list[int]:
        """What the arrays' shapes alone do not tell: rows per part, dropped rows, whether there are holes."""
        return [*self.keys.counts(), *self.values.counts(), self.dead, int(self.holes)]

    def set_counts(self, counts: list[int]) -> None:
        """Restore what ``counts()`` gave."""
        k = len(self.keys.counts())
        self.keys.set_counts(counts[:k])
        self.values.set_counts(counts[k:-2])
        self.dead, self.holes = counts[-2], bool(counts[-1])


def _gather(x: mx.array, index: mx.array) -> mx.array:
    """``x`` ``(B | 1, H | 1, n)`` at ``index`` ``(B | 1, H | 1, m)``."""
    lead = mx.broadcast_shapes(x.shape[:2], index.shape[:2])
    x, index = mx.broadcast_to(x, (*lead, x.shape[2])), mx.broadcast_to(index, (*lead, index.shape[2]))
    return mx.take_along_axis(x, index, axis=-1)


def _put(x: mx.array, slot: mx.array, value: int) -> mx.array:
    """``x`` ``(B | 1, H | 1, n)`` with ``value`` at ``slot`` ``(B | 1, H | 1, 1)``."""
    lead = mx.broadcast_shapes(x.shape[:2], slot.shape[:2])
    x, index = mx.broadcast_to(x, (*lead, x.shape[2])), mx.broadcast_to(slot, (*lead, 1))
    return mx.put_along_axis(x, index, mx.full(index.shape, value, x.dtype), axis=-1)
