"""One tensor (keys or values) of one layer: float rows, sealed codes, and how they are read, for every codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..codecs.base import TILE, Codec, Codes, GuidedCodec, Readable, after, cast, compute_dtype, take_rows
from ..core.types import Stream
from .added import Added
from .exact import Exact
from .places import Places
from .rows import GROW, Block, Packed, Rows

# Something per row, for rows ``start`` to ``stop``: positions, or what a guide knows.
PerRow = Callable[[int, int], mx.array]


class StreamStore:
    """One tensor of one layer: rows ``[sinks | prompt | packed | tail]``. ``places`` says which tokens they are.

    Rows that codecs of older rows hold stand before those of ``packed``, the oldest first; ``older`` starts with the
    youngest.
    """

    def __init__(self, spec: Stream, places: Places):
        self.spec, self._where = spec, places.where
        # A tail that only grows gets room to grow; a bounded one is held to the row.
        self.sinks, self.tail = Rows(), Rows(GROW if spec.grows else 1)
        self.prompt = Block(spec.prompt) if spec.prompt is not None else None
        self.packed = Packed(spec.codec) if spec.codec is not None else None
        self.older = [Packed(codec) for _, codec in spec.older]
        self.added, self.exact = Added(), Exact(places)
        # Of the rows as they came; known from the first append on.
        self.dtype, self.batch, self.heads, self.dim = mx.float32, 0, 0, 0

    @property
    def n_sealed(self) -> int:
        """Rows held as codes."""
        return sum(part.n for part in self._sealed())

    @property
    def n(self) -> int:
        """Rows held."""
        return self.sinks.n + self.n_sealed + self.tail.n

    def _sealed(self) -> list[Block]:
        return [part for part in (self.prompt, *reversed(self.older), self.packed) if part is not None and part.n]

    # ------------------------------------------------------------------------------------------------------- sealing

    def seal(
        self,
        guide: PerRow | None = None,
        ends: bool = False,
        others: Sequence[StreamStore] = (),
        n: int | None = None,
        most: int | None = None,
    ) -> int:
        """Encode every row that has left the window; returns how many. ``ends``: the first prompt is complete.

        ``others`` are the same tensor of the layers that are packed together with this one. ``n``: rows that all of
        them have (None: those of this one). ``most`` rows do not wait for the end of the prompt.
        """
        if self.packed is None:
            return 0
        n, streams = self.n if n is None else n, (self, *others)
        before = self.n_sealed
        if self.prompt is not None and (due := self.of_prompt(ends)):
            if self.prompt.spec.fit_rows and not self.packed.fitted:
                self._fit(self.packed.spec.fit_rows, streams)
            self.prompt.codes, self.prompt.n = self._encode(self.prompt.codec, due, streams, guide), due
        due = self.of_codec(n)
        if due > 0 and self.packed.spec.fit_rows and not self.packed.fitted:
            # The rows at the end of a prompt are the same however it came; later on only their number can be.
            early = self.spec.first_rows if most is None or n < most else most
            # Of layers that are packed together some may have newer rows than all have.
            self._fit(min(self.packed.spec.fit_rows, n - self.spec.sinks) if ends else early, streams)
        if due > 0:
            self.packed.append(self._encode(self.packed.codec, due, streams, guide), due)
            for other in others:
                assert other.packed is not None
                other.packed.n = self.packed.n
        self._age(self.packed, n - self._of_block)
        return self.n_sealed - before

    def of_prompt(self, ends: bool) -> int:
        """Rows that the next ``seal`` encodes as the block of the prompt, if that ``ends``."""
        if self.prompt is None or self.packed is None or not ends or self.n_sealed:
            return 0
        fit = self.spec.first_rows if self.prompt.spec.fit_rows and not self.packed.fitted else 0
        return self.spec.n_due(self.n) if self.n >= self.spec.sinks + fit else 0

    def of_codec(self, n: int | None = None) -> int:
        """Rows that the next ``seal`` encodes by ``codec``; those of the prompt's block do not count."""
        if self.packed is None:
            return 0
        n, held = self.n if n is None else n, self._of_block
        return max(0, self.spec.n_sealed(n - held, bool(self.packed.fitted)) - (self.n_sealed - held))

    @property
    def _of_block(self) -> int:
        return self.prompt.n if self.prompt is not None else 0

    def _fit(self, n: int, streams: Sequence[StreamStore]) -> None:
        """Fit on the first ``n`` rows after the sinks and the prompt, or on all there are, of ``streams``."""
        assert self.packed is not None
        fitted = self.packed.spec.fit(_side_by_side([stream._front(n) for stream in streams]))
        for stream in streams:
            stream.learn(fitted)

    def _front(self, n: int) -> mx.array:
        """The first ``n`` float rows after the sinks as codecs see them; they stay."""
        self._fill_sinks()
        rows, start = self.tail.view(), self.sinks.n + self.n_sealed
        assert rows is not None
        first = self._turn(rows[..., :n, :], start, back=True)
        n = first.shape[2]
        return self.exact.shielded(first, self._where(start, start + n), n)

    def learn(self, fitted: Codes) -> None:
        """A fit serves every codec of the stream that asks for one."""
        for part in (self.prompt, self.packed):
            if part is not None and part.spec.fit_rows:
                part.fit(fitted)

    def _age(self, younger: Packed, rows: int) -> None:
        """Hand codes on to the codecs of their age, through every codec between: so history does not matter."""
        for i, (age, _) in enumerate(self.spec.older):
            part, due = self.older[i], self.spec.n_aged(rows, age) - sum(part.n for part in self.older[i:])
            if due > 0:
                part.append(younger.codec.demote(younger.pop_front(due), part.codec), due)
            younger = part

    def _fill_sinks(self) -> None:
        if self.sinks.n < self.spec.sinks:
            self.sinks.append(self.tail.pop_front(self.spec.sinks - self.sinks.n))

    def _take(self, m: int, block: int) -> mx.array:
        """The oldest ``m`` float rows after the sinks as codecs see them, taken out of the tail."""
        self._fill_sinks()
        rows, start = self.tail.pop_front(m), self.sinks.n + self.n_sealed
        self.exact.note(rows, self._where(start, start + m))
        rows = self._turn(rows, start, back=True)
        if block > 1:  # single tokens share no range
            rows = self.exact.shielded(rows, self._where(start, start + m), block)
        return rows

    def _encode(self, codec: Codec, m: int, streams: Sequence[StreamStore], guide: PerRow | None) -> Codes:
        """Codes of the oldest ``m`` float rows of ``streams``, which lose them."""
        rows = _side_by_side([stream._take(m, codec.block) for stream in streams])
        start = self.sinks.n + self.n_sealed
        if isinstance(codec, GuidedCodec):
            assert guide is not None, "a guided codec needs a recipe with a guide"
            return codec.encode_guided(rows, guide(start, start + m))
        return codec.encode(rows)

    def _turn(self, rows: mx.array, start: int, back: bool = False) -> mx.array:
        """Rows from index ``start`` on with their rotary positions and bias taken out (``back``) or put in again."""
        return self._turn_at(rows, lambda: self._where(start, start + rows.shape[2]), back)

    def _turn_at(self, rows: mx.array, where: Callable[[], mx.array], back: bool) -> mx.array:
        rotation, bias = self.spec.rotation, self.spec.bias
        if rotation is None and bias is None:
            return rows
        dtype, positions, wide = rows.dtype, where(), rows.astype(mx.float32)
        if back:
            wide = wide if rotation is None else rotation.turn(wide, -positions)
            return wide if bias is None else wide - bias.rows(positions)
        wide = wide if bias is None else wide + bias.rows(positions)
        return cast(wide if rotation is None else rotation.turn(wide, positions), dtype)

    # ------------------------------------------------------------------------------------------------------- reading

    def dense(
        self, start: int = 0, stop: int | None = None, dtype: mx.Dtype | None = None, done: list[mx.array] | None = None
    ) -> mx.array:
        """Rows ``start`` to ``stop`` decoded, ``(B, H, stop - start, D)``; only the blocks touched are decoded.

        With ``done``, decoding waits until those arrays are computed.
        """
        stop = self.n if stop is None else stop
        parts, at = [], 0
        for part in (self.sinks, *self._sealed(), self.tail):
            a, b = max(start - at, 0), min(stop - at, part.n)
            if a < b:
                rows = _slice(part, a, b) if isinstance(part, Rows) else self._decoded(part, a, b, at, dtype, done)
                parts.append(rows if dtype is None else rows.astype(dtype))
            at += part.n
        return self.added.to_rows(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2), start)

    def _decoded(
        self,
        part: Block,
        start: int,
        stop: int,
        first: int,
        dtype: mx.Dtype | None,
        done: list[mx.array] | None,
    ) -> mx.array:
        """Rows ``start`` to ``stop`` of a sealed part, whose own first row is row ``first``."""
        rows = part.codec.rows(after(part.codes, done or []), start, stop, dtype or self.dtype)
        return self.exact.to_rows(self._turn(rows, first + start), self._where(first + start, first + stop))

    def readable(self) -> Readable | str | None:
        """How kernels read the packed rows, None where there are none, or what they cannot read."""
        sealed = self._sealed()
        if not sealed:
            return None
        if sealed != [self.packed]:
            return "in several codecs"
        if self.spec.rotation is not None or self.spec.bias is not None:
            return "without their positions or bias"
        if self.exact.rows is not None or self.added.rows is not None:
            return "with exact or merged rows among them"
        codec = sealed[0].codec
        return codec.readable(sealed[0].codes) or f"of {type(codec).__name__}"

    def append(self, x: mx.array) -> None:
        """Add rows at the end of the tail."""
        self.dtype, (self.batch, self.heads, _, self.dim) = x.dtype, x.shape
        self.tail.append(x if self.spec.dtype is None else x.astype(self.spec.dtype))

    def scores(self, q: mx.array) -> mx.array:
        """Scores ``(B, H, R, n)`` of scaled query rows ``(B, H, R, D)``, computed on the packed data."""
        parts = []
        if (sinks := self.sinks.view()) is not None:
            parts.append(q @ sinks.astype(q.dtype).swapaxes(-1, -2))
        at = self.sinks.n
        for part in self._sealed():
            if self.spec.rotation is None:
                # Over the whole buffers, then cut: slicing codes would copy them.
                scores = part.codec.scores(q, part.codes)[..., : part.n]
                bias, positions = self.spec.bias, self._where(at, at + part.n)
                scores = scores if bias is None else scores + bias.scores(q, positions)
                parts.append(self.exact.to_scores(scores, q, positions))
            else:
                parts += self._turned_scores(part, q, at)
            at += part.n
        if (tail := self.tail.view()) is not None:
            parts.append(q @ tail.astype(q.dtype).swapaxes(-1, -2))
        return self.added.to_scores(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1), q)

    def _turned_scores(self, part: Block, q: mx.array, at: int) -> list[mx.array]:
        """Scores of a sealed part whose rows must be turned before they meet the queries, tile by tile."""
        wide, out = q.astype(compute_dtype(q.dtype)), []
        for start in range(0, part.n, TILE):
            rows = self._decoded(part, start, min(start + TILE, part.n), at, wide.dtype, out[-1:])
            out.append((wide @ rows.swapaxes(-1, -2)).astype(q.dtype))
        return out

    def mix(self, p: mx.array) -> mx.array:
        """Weighted sums ``(B, H, R, D)`` of the rows under weights ``(B, H, R, n)``."""
        assert self.spec.rotation is None, "values have no positions"
        parts, at = [], self.sinks.n
        if (sinks := self.sinks.view()) is not None:
            parts.append(p[..., :at] @ sinks.astype(p.dtype))
        for part in self._sealed():
            weights, own = self.exact.split(p[..., at : at + part.n], self._where(at, at + part.n))
            if own is not None:
                parts.append(own)
            spare = part.capacity - part.n if isinstance(part, Packed) else 0
            if spare:
                weights = mx.pad(weights, [(0, 0)] * 3 + [(0, spare)])
            parts.append(part.codec.mix(weights, part.codes))
            at += part.n
        if (tail := self.tail.view()) is not None:
            parts.append(p[..., at:] @ tail.astype(p.dtype))
        out = parts[0]
        for part in parts[1:]:
            out = out + part
        return self.added.to_mix(out, p)

    # ------------------------------------------------------------------------------------------------------ dropping

    def truncate(self, n: int) -> None:
        """Keep the oldest ``n`` rows. Rows of a block that is cut come back decoded, into the tail."""
        held = self.sinks.n + self.n_sealed
        if n >= held:
            self.tail.truncate(n - held)
            return
        self.tail.replace(None)
        at, rest = self.sinks.n, []
        for part in self._sealed():
            keep = min(max(n - at, 0), part.n)
            whole = keep // part.codec.block * part.codec.block if isinstance(part, Packed) else keep // part.n * keep
            if whole < keep:
                rest.append(self._decoded(part, whole, keep, at, None, None))
            at += part.n
            if isinstance(part, Packed):
                part.truncate(whole)
            elif not whole:
                part.n, part.codes = 0, {}
        if rest:
            self.tail.replace(rest[0])
        if n < self.sinks.n:
            self.sinks.truncate(n)
        if not self.n_sealed:
            self.exact.rows = None
        if self.packed is not None and not self.packed.n and n < self.spec.sinks + self.spec.first_rows:
            self.learn({})

    def put(self, x: mx.array, slot: mx.array) -> None:
        """Overwrite one float row per head with ``x`` ``(B, H, 1, D)`` at ``slot`` ``(B | 1, H | 1, 1)``."""
        assert self.n == self.tail.n, "slots are reused only among float rows"
        self.tail.put(x, slot)

    def add(self, index: mx.array, delta: mx.array) -> None:
        """Add float32 ``delta`` ``(B, H, m, D)`` to rows ``index`` ``(B | 1, H | 1, m)``.

        Where rows are held as codes, what was added before to other rows than these is forgotten (``cache.added``).
        """
        rows = self.tail.view()
        if rows is not None and self.n == self.tail.n:
            self.tail.put(take_rows(rows, index).astype(mx.float32) + delta, index)
        else:
            self.added.put(index, delta)

    def keep(self, index: mx.array) -> None:
        """Keep the rows that ``index`` ``(B | 1, H | 1, m)`` names, in that order.

        Codes of single tokens move as they are. Where tokens were coded together, what stays comes back decoded, and is
        encoded anew by the next ``seal``.
        """
        floats = self.tail.view()
        if floats is not None and self.n == self.tail.n:
            self.tail.replace(take_rows(floats, index))
            return
        index = mx.broadcast_to(index, (self.batch, self.heads, index.shape[2]))
        m, codes = index.shape[2], self._codes_of_all()
        if codes is None:
            rows = take_rows(self.dense(), index)
            for part in self._sealed():
                part.n, part.codes = 0, {}
            self.sinks.replace(None)
            self.tail.replace(rows)
            self.added.clear()
            return
        assert self.packed is not None
        a = min(self.spec.sinks, m)
        b = a + self.spec.n_due(m)  # codes of single tokens stay codes, whole chunks or not
        sinks, tail = self._mixed(codes, index[..., :a]), self._mixed(codes, index[..., b:])
        kept = self.packed.codec.take(codes, index[..., a:b])
        assert kept is not None
        self.added.move(index, self.n)
        self.packed.replace(kept, b - a)
        self.sinks.replace(sinks)
        self.tail.replace(tail)

    def _codes_of_all(self) -> Codes | None:
        """Codes of every row held, float rows encoded for the purpose; None where rows are not coded one by one."""
        if self.packed is None or self.prompt is not None or self.older or isinstance(self.packed.spec, GuidedCodec):
            return None
        codec = self.packed.codec
        held = self.packed.view()
        if not held or codec.take(held, mx.zeros((self.batch, self.heads, 1), mx.int32)) is None:
            return None
        parts: list[Codes] = []
        for rows, start in ((self.sinks, 0), (self.tail, self.sinks.n + self.packed.n)):
            view = rows.view()
            if view is not None:
                self.exact.note(view, self._where(start, start + rows.n))
                parts.append(codec.encode(self._turn(view, start, back=True)))
        if self.sinks.n:
            parts.insert(1, held)
        else:
            parts.insert(0, held)
        return {name: mx.concatenate([part[name] for part in parts], axis=2) for name in codec.layout}

    def _mixed(self, codes: Codes, index: mx.array) -> mx.array | None:
        """Rows ``index`` ``(B, H, m)`` as floats: float rows as they are, coded ones decoded."""
        assert self.packed is not None
        if index.shape[2] == 0:
            return None
        taken = self.packed.codec.take(codes, index)
        assert taken is not None
        rows = self.packed.codec.decode(taken, self.dtype)
        every = mx.broadcast_to(self._where(0, self.n), (self.batch, self.heads, self.n))
        positions = mx.take_along_axis(every, index, axis=-1)
        rows = self.exact.to_rows(self._turn_at(rows, lambda: positions, back=False), positions)
        first, n = self.sinks.n, self.packed.n
        floats = [view for part in (self.sinks, self.tail) if (view := part.view()) is not None]
        if not floats:
            return rows
        is_float = (index < first) | (index >= first + n)
        at = mx.where(is_float, mx.where(index < first, index, index - n), 0)
        return mx.where(
            is_float[..., None], take_rows(mx.concatenate(floats, axis=2), at), rows.astype(floats[0].dtype)
        )

    def cut(self, start: int, stop: int) -> None:
        """Drop rows ``start`` to ``stop``; float rows only (rows that are sealed are dropped by ``keep``)."""
        rows = self.tail.view()
        assert rows is not None and self.n == self.tail.n, "cut is for rows that are not sealed"
        self.tail.replace(mx.concatenate([rows[..., :start, :], rows[..., stop:, :]], axis=2))

    # -------------------------------------------------------------------------------------------------------- arrays

    def remarks(self) -> tuple[str, ...]:
        """What codecs say of the rows that they hold, for the receipt."""
        return tuple(text for part in self._sealed() for text in part.codec.remarks(part.codes))

    def arrays(self) -> dict[str, mx.array]:
        """Every array held, by name."""
        out = {name: rows.data for name, rows in (("sinks", self.sinks), ("tail", self.tail)) if rows.data is not None}
        if self.added.at is not None and self.added.rows is not None:
            out |= {"added.at": self.added.at, "added.rows": self.added.rows}
        if self.exact.rows is not None:
            out["exact"] = self.exact.rows
        if self.prompt is not None:
            out |= {f"prompt.{name}": a for name, a in self.prompt.codes.items()}
        if self.packed is not None:
            own = self.packed.spec.owns
            out |= {f"fitted.{name}": a for name, a in self.packed.fitted.items() if own(name)}
            out |= {name: a for name, a in self.packed.codes.items() if own(name)}
        for i, part in enumerate(self.older):
            out |= {f"older{i}.{name}": a for name, a in part.codes.items()}
        return out

    def set_array(self, name: str, array: mx.array) -> None:
        """Put back an array that ``arrays()`` gave."""
        kind, _, field = name.partition(".")
        if name in ("sinks", "tail"):
            getattr(self, name).data = array
        elif kind == "added":
            setattr(self.added, field, array)
        elif kind == "exact":
            self.exact.rows = array
        elif kind == "prompt":
            assert self.prompt is not None
            self.prompt.codes[field] = array
        elif kind.startswith("older"):
            self.older[int(kind.removeprefix("older"))].codes[field] = array
        else:
            assert self.packed is not None
            if kind == "fitted":
                self.learn(self.packed.fitted | {field: array})
            else:
                self.packed.codes[name] = array

    def counts(self) -> list[int]:
        """Rows per part: what the arrays' shapes alone do not tell."""
        return [part.n if part is not None else 0 for part in self._parts()]

    def set_counts(self, counts: list[int]) -> None:
        """Restore what ``counts()`` gave."""
        for part, n in zip(self._parts(), counts, strict=True):
            if part is not None:
                part.n = n

    def _parts(self) -> list[Rows | Block | None]:
        return [self.sinks, self.prompt, self.packed, self.tail, *self.older]


def _side_by_side(rows: Sequence[mx.array]) -> mx.array:
    """Rows ``(B, H, n, D)`` of layers that are packed together as one ``(B, G H, n, D)``."""
    return rows[0] if len(rows) == 1 else mx.concatenate(list(rows), axis=1)


def _slice(rows: Rows, start: int, stop: int) -> mx.array:
    assert rows.data is not None
    return rows.data if stop - start == rows.data.shape[2] else rows.data[..., start:stop, :]
