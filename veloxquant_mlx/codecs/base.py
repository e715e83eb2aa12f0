"""What every codec says. A codec is immutable and shared; the codes it makes belong to the store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx

Codes = dict[str, mx.array]

# Rows decoded at a time where no native path exists: bounds the scratch memory of one call.
TILE = 1024

# More rows than a prompt has: a fit takes what is there.
ALL = 1 << 30

F16_MAX = 65504.0


def after(codes: Codes, done: list[mx.array]) -> Codes:
    """The same codes, to be read only once ``done`` is computed: keeps decoded tiles from living side by side."""
    return dict(zip(codes, mx.depends(list(codes.values()), done), strict=True)) if done else codes


def compute_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """The dtype to multiply in for queries of ``dtype``: float32, save for float16 on a GPU.

    On the CPU half precision is 50 times slower and adds up in half precision; bfloat16 would round the levels.
    """
    return dtype if dtype == mx.float16 and mx.default_device() == mx.gpu else mx.float32


def cast(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Decoded rows in ``dtype``; float16 stops at its largest number, where rounding errors would lead to infinity."""
    return (mx.clip(x, -F16_MAX, F16_MAX) if dtype == mx.float16 else x).astype(dtype)


def take_rows(x: mx.array, index: mx.array) -> mx.array:
    """``x`` ``(B, H, n, D)`` at rows ``index`` ``(B | 1, H | 1, m)``, into a buffer of its own."""
    if index.shape[0] == index.shape[1] == 1:
        return mx.take(x, index[0, 0], axis=2)
    b, h, _, d = x.shape
    return mx.take_along_axis(x, mx.broadcast_to(index[..., None], (b, h, index.shape[2], d)), axis=2)


class Axis(NamedTuple):
    """Where the tokens run in one array of a codec's codes.

    ``block`` tokens of the codec take ``slots`` consecutive entries along ``axis`` (negative: from the end).
    """

    axis: int
    slots: int


class Symbols(NamedTuple):
    """Packed codes ``(B, H, n, W)`` uint32 of ``bits`` each that an entropy coder makes shorter at rest.

    ``per_channel``: every channel of a head may have a frequency table of its own, where that pays.
    """

    bits: int
    per_channel: bool = False


class Readable(NamedTuple):
    """How a kernel reads the codes of rows, ``dim`` numbers each in the basis of the codes.

    ``kind``: ``token_affine`` and ``channel_affine`` (``codecs.affine``: ``words``, ``scales``, ``biases``),
    ``codebook`` (levels ``table`` ``(2 ** bits,)`` times ``scales`` ``(B, H, n)``), ``product`` (``words`` are bytes of
    indices into ``table`` ``(B | 1, H | 1, P | 1, K, sub)``). ``group`` is that of the scales. ``on_query`` takes float
    queries ``(..., D)`` into the basis of the codes, ``from_mix`` weighted sums out of it; None: they are in it.
    ``signs`` ``(D,)``: the very same map is these signs and then the orthonormal Hadamard transform of a power of two
    from 32 on, which kernels make themselves. ``sketch`` are signs (a codebook of 1 bit with a query basis of its own)
    of what the codes miss: scores add up.
    """

    kind: str
    bits: int
    dim: int
    words: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    table: mx.array | None = None
    group: int = 0
    on_query: Callable[[mx.array], mx.array] | None = None
    from_mix: Callable[[mx.array], mx.array] | None = None
    signs: mx.array | None = None
    sketch: Readable | None = None

    def behind(self, on_query: Callable[[mx.array], mx.array], from_mix: Callable[[mx.array], mx.array]) -> Readable:
        """The same codes of rows that went through one more transform."""
        inner, outer = self.on_query, self.from_mix
        return self._replace(
            on_query=on_query if inner is None else lambda q: inner(on_query(q)),
            from_mix=from_mix if outer is None else lambda y: from_mix(outer(y)),
            signs=None,
            sketch=None if self.sketch is None else self.sketch.behind(on_query, from_mix),
        )


class Codec(ABC):
    """Turns rows ``(B, H, n, D)`` into codes and attends on the codes.

    ``block`` is the number of tokens that are encoded together (1: every token on its own). ``layout`` names the
    arrays of the codes and how tokens run in them, so that the store can grow, cut and gather any codec's codes
    without knowing what they mean.

    A codec with ``fit_rows`` needs that many rows before it can encode: the store calls ``fit`` once and works with
    what ``bind`` makes of the result.

    ``symbols`` names the arrays that a cache file holds entropy coded (``codecs/entropy.py``).
    """

    block: int = 1
    fit_rows: int = 0
    layout: Mapping[str, Axis]
    symbols: Mapping[str, Symbols] = MappingProxyType({})

    @abstractmethod
    def encode(self, x: mx.array) -> Codes:
        """Codes of ``x`` ``(B, H, n, D)``, any float dtype, ``n`` a multiple of ``block``. Work is done in float32."""

    def fit(self, x: mx.array) -> Codes:
        """Arrays that the first ``fit_rows`` rows ``(B, H, fit_rows, D)`` teach; they belong to the sequence."""
        raise NotImplementedError(f"{type(self).__name__} has nothing to fit")

    def bind(self, fitted: Codes) -> Codec:
        """The codec that works with what ``fit`` gave."""
        raise NotImplementedError(f"{type(self).__name__} has nothing to fit")

    def demote(self, codes: Codes, into: Codec) -> Codes:
        """These codes as codes of the coarser ``into``, which takes over rows that have grown old."""
        return into.encode(self.decode(codes))

    @abstractmethod
    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The rows ``(B, H, n, D)`` that the codes stand for."""

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        """Dot products ``(B, H, R, n)`` of query rows ``q`` ``(B, H, R, D)`` (already scaled) with the stored rows."""
        query = q.astype(compute_dtype(q.dtype))
        return self.tiled_scores(query, codes, lambda tile: self.decode(tile, query.dtype)).astype(q.dtype)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        """Weighted sums ``(B, H, R, D)`` of the stored rows; ``p`` is ``(B, H, R, n)``."""
        weights = p.astype(compute_dtype(p.dtype))
        return self.tiled_mix(weights, codes, lambda tile: self.decode(tile, weights.dtype)).astype(p.dtype)

    def tiled_scores(self, query: mx.array, codes: Codes, rows: Callable[[Codes], mx.array]) -> mx.array:
        """``query`` times what ``rows`` makes of the codes, with one tile of that alive at a time."""
        parts: list[mx.array] = []
        for tile in self.tiles(codes):
            parts.append(query @ rows(after(tile, parts[-1:])).swapaxes(-1, -2))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def tiled_mix(self, weights: mx.array, codes: Codes, rows: Callable[[Codes], mx.array]) -> mx.array:
        """``weights`` times what ``rows`` makes of the codes, in float32, with one tile of that alive at a time."""
        sums: list[mx.array] = []
        start = 0
        for tile in self.tiles(codes):
            some = rows(after(tile, sums[-1:]))
            part = (weights[..., start : start + some.shape[2]] @ some).astype(mx.float32)
            sums.append(part if not sums else sums[-1] + part)
            start += some.shape[2]
        return sums[-1]

    def rows(self, codes: Codes, start: int, stop: int, dtype: mx.Dtype = mx.float32) -> mx.array:
        """Rows ``start`` to ``stop`` decoded; only the blocks touched are."""
        low, high = start // self.block * self.block, -(-stop // self.block) * self.block
        return self.decode(self.cut(codes, low, high), dtype)[..., start - low : stop - low, :]

    def readable(self, codes: Codes) -> Readable | None:
        """How kernels read these codes (whole buffers); None where none can."""
        return None

    def remarks(self, codes: Codes) -> tuple[str, ...]:
        """What the receipt says of these codes beyond their bytes; may wait for numbers."""
        return ()

    def owns(self, name: str) -> bool:
        """Whether the array ``name`` of codes or fit belongs to this codec's layer; no where layers share it."""
        return True

    def n_tokens(self, codes: Codes) -> int:
        """How many tokens the codes hold."""
        name, (axis, slots) = next(iter(self.layout.items()))
        return codes[name].shape[axis] // slots * self.block

    def cut(self, codes: Codes, start: int, stop: int) -> Codes:
        """The codes of tokens ``start`` to ``stop``, both multiples of ``block``."""
        out = {}
        for name, (axis, slots) in self.layout.items():
            index = [slice(None)] * codes[name].ndim
            index[axis] = slice(start // self.block * slots, stop // self.block * slots)
            out[name] = codes[name][tuple(index)]
        return out

    def take(self, codes: Codes, index: mx.array) -> Codes | None:
        """The codes of tokens ``index`` ``(B, H, m)``; None where tokens or heads are not coded on their own."""
        out = {}
        for name, (axis, slots) in self.layout.items():
            array = codes[name]
            if self.block != 1 or slots != 1 or axis % array.ndim != 2:
                return None
            wide = index.reshape(*index.shape, *[1] * (array.ndim - 3))
            out[name] = mx.take_along_axis(array, mx.broadcast_to(wide, (*index.shape, *array.shape[3:])), axis=2)
        return out

    def tiles(self, codes: Codes, rows: int = TILE) -> list[Codes]:
        """The codes in pieces of about ``rows`` tokens."""
        n, step = self.n_tokens(codes), max(rows // self.block, 1) * self.block
        if n <= step:
            return [codes]
        return [self.cut(codes, start, min(start + step, n)) for start in range(0, n, step)]


class GuidedCodec(Codec):
    """A codec that is told about the rows it encodes what the recipe's guide (``policies.guide``) knows of them."""

    @abstractmethod
    def encode_guided(self, x: mx.array, guide: mx.array) -> Codes:
        """Codes of ``x`` ``(B, H, n, D)`` under what ``Guide.rows`` gave for the same rows."""
