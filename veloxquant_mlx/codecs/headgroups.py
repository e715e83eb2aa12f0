"""Latents that the kv heads of a group share, quantised per token: what Palu stores (Chang et al., arXiv 2407.21118).

The heads of a group stand side by side as one row of ``s D`` numbers, and its coordinates on the group's leading axes
are what is kept. Axes come from any rows: of a prompt, of a calibration text, or of the layer's weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import ceil
from types import MappingProxyType

import mlx.core as mx
import numpy as np

from ..transforms.rotation import hadamard_is_safe
from .affine import TokenAffine
from .base import Axis, Codec, Codes, cast
from .basis import gram_axes, sampled

FLOAT = 16  # bits of latents that are not quantised
ROWS_PER_LATENT = 4  # a basis of the sequence's own must have more rows than so many for each of its axes


class HeadGroups:
    """``heads`` neighbouring heads in at most ``groups`` groups; sizes differ by one at most, the first are the larger.

    Every group has ``size`` slots; in a smaller group the last one is empty, and counts as zeros.
    """

    def __init__(self, heads: int, groups: int) -> None:
        parts = np.array_split(np.arange(heads), min(groups, heads))
        self.count, self.size = len(parts), len(parts[0])
        self.slots = [int(h) for part in parts for h in (*part, *[heads] * (self.size - len(part)))]
        self.places = [i for i, head in enumerate(self.slots) if head < heads]

    def fill(self, x: mx.array) -> mx.array:
        """``x`` ``(B, H, ...)`` by slots, ``(B, G * size, ...)``."""
        if len(self.slots) == len(self.places):
            return x
        return mx.take(mx.concatenate([x, mx.zeros_like(x[:, :1])], axis=1), mx.array(self.slots), axis=1)

    def empty(self, x: mx.array) -> mx.array:
        """The heads ``(B, H, ...)`` of ``x`` ``(B, G * size, ...)``."""
        return x if len(self.slots) == len(self.places) else mx.take(x, mx.array(self.places), axis=1)

    def beside(self, x: mx.array) -> mx.array:
        """Rows ``(B, G, n, size * D)`` of heads side by side, from ``x`` ``(B, H, n, D)``."""
        b, _, n, dim = x.shape
        return self.fill(x).reshape(b, self.count, self.size, n, dim).swapaxes(2, 3).reshape(b, self.count, n, -1)

    def apart(self, y: mx.array) -> mx.array:
        """The heads ``(B, H, n, D)`` of rows ``y`` ``(B, G, n, size * D)``."""
        b, _, n, wide = y.shape
        y = y.reshape(b, self.count, n, self.size, wide // self.size).swapaxes(2, 3)
        return self.empty(y.reshape(b, self.count * self.size, n, -1))

    def below(self, x: mx.array) -> mx.array:
        """``x`` ``(B, H, R, k)`` with the heads of a group one below the other, ``(B, G, size * R, k)``."""
        return self.fill(x).reshape(x.shape[0], self.count, self.size * x.shape[2], x.shape[3])

    def above(self, y: mx.array) -> mx.array:
        """``x`` of ``below``."""
        return self.empty(y.reshape(y.shape[0], len(self.slots), y.shape[2] // self.size, y.shape[3]))


@lru_cache(maxsize=64)
def hadamard(n: int) -> np.ndarray:
    """An orthogonal matrix ``(n, n)``: Hadamard, or blocks of such in falling sizes where MLX has none of ``n``."""
    sizes = [n] if hadamard_is_safe(n) else [1 << i for i in reversed(range(n.bit_length())) if n >> i & 1]
    out, at = np.zeros((n, n), np.float32), 0
    for size in sizes:
        block = np.array(mx.hadamard_transform(mx.eye(size))) if size > 1 else np.ones((1, 1))
        out[at : at + size, at : at + size] = block
        at += size
    return out


class Half(Codec):
    """Rows as they are, in float16. Codes: ``rows`` ``(B, H, n, D)``."""

    layout: Mapping[str, Axis] = MappingProxyType({"rows": Axis(-2, 1)})

    def encode(self, x: mx.array) -> Codes:
        return {"rows": cast(x, mx.float16)}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return cast(codes["rows"], dtype)


class Snug(Codec):
    """``TokenAffine`` without the padding of its rows: ``words`` uint8 in whole bytes, parameters of groups in use."""

    def __init__(self, bits: int, group: int, *, dim: int) -> None:
        self._wide = TokenAffine(bits, group, dim=dim)
        self._sizes = {
            "words": ceil(dim * bits / 8),
            **dict.fromkeys(("scales", "biases"), ceil(dim / self._wide.group)),
        }
        self.layout = self._wide.layout

    def encode(self, x: mx.array) -> Codes:
        codes = self._wide.encode(x)
        codes["words"] = codes["words"].view(mx.uint8)
        return {name: codes[name][..., :size] for name, size in self._sizes.items()}

    def _padded(self, codes: Codes) -> Codes:
        whole = {"words": self._wide.padded_dim * self._wide.bits // 8}
        out = {}
        for name, array in codes.items():
            spare = whole.get(name, self._wide.padded_dim // self._wide.group) - array.shape[-1]
            out[name] = mx.pad(array, [(0, 0)] * 3 + [(0, spare)]) if spare else array
        return out | {"words": mx.contiguous(out["words"]).view(mx.uint32)}

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return self._wide.decode(self._padded(codes), dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        return self._wide.scores(q, self._padded(codes))

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        return self._wide.mix(p, self._padded(codes))


class GroupLatents(Codec):
    """``x ~ offset + z U^T``, one latent row ``z`` per token and group of heads.

    ``r`` latents per group: ``rank`` for each of its heads, or the fewest of a multiple of 32 (below 32: of 8) that
    hold the share ``energy`` of the squared singular values; the groups of a layer share the largest number. The first
    ``share`` of them (rounded up) get ``bits[0]``, the others ``bits[1]``, each tier turned by a Hadamard matrix, with
    min/max groups of ``group`` latents of a token; 16 bits are float16, and equal bits make one tier.

    Fitted: ``basis`` float16 ``(B, H, D, r)``, the rows of ``U`` that belong to each head. Codes, for tiers ``a`` and
    ``b``: those of ``Snug`` or ``Half`` per group, ``a_words`` uint8 ``(B, G, n, bytes)`` and so on.
    """

    def __init__(
        self,
        groups: int,
        bits: tuple[int, int],
        *,
        rank: int | None = None,
        energy: float = 0.9,
        share: float = 0.25,
        group: int = 32,
        fit_rows: int = 0,
    ) -> None:
        self.fit_rows, self._groups, self._rank, self._energy = fit_rows, groups, rank, energy
        self._bits, self._share, self._group = bits, share, group
        self.layout = {}
        self._basis = self._offset = None
        self._heads = HeadGroups(1, 1)
        self._tiers: list[tuple[str, Codec]] = []

    # ------------------------------------------------------------------------------------------------------- fitting

    def learn(self, x: mx.array) -> Codes:
        """All axes of the groups in rows ``x`` ``(B, H, n, D)``: ``axes`` ``(B, H, D, size * D)``, largest first, and
        their ``energy`` ``(B, G, size * D)``, float32. Nothing is centred.
        """
        heads, dim = HeadGroups(x.shape[1], self._groups), x.shape[3]
        rows = heads.beside(x.astype(mx.float32))
        gram = rows.swapaxes(-1, -2) @ rows
        # Empty slots have axes of their own, after all others.
        used = mx.repeat(mx.array(heads.slots) < x.shape[1], dim).reshape(heads.count, 1, -1)
        axes, energy = gram_axes(gram - mx.eye(gram.shape[-1]) * mx.where(used, 0.0, 1.0))
        axes = heads.empty(axes.reshape(x.shape[0], len(heads.slots), dim, -1))
        return {"axes": axes, "energy": energy}

    def arrange(self, learned: Codes, most: int | None = None) -> Codes:
        """The fitted arrays: the axes wanted, ``most`` at most, turned by the Hadamard matrices of their tiers."""
        axes, energy = learned["axes"], learned["energy"]
        heads, dim = HeadGroups(axes.shape[1], self._groups), axes.shape[2]
        if self._rank is not None:
            r = heads.size * min(self._rank, dim)
        else:
            held = mx.cumsum(energy, axis=-1)
            short = (held < self._energy * energy.sum(-1, keepdims=True) * (1 - 1e-6)).sum(-1)
            r = int(np.array(short.max())) + 1
            r = -(-r // (32 if r > 24 else 8)) * (32 if r > 24 else 8)
        if most is not None and r > most:
            r = max(most // 8 * 8, 8)
        r = min(r, heads.size * dim)
        parts, at = [], 0
        for _, width in self._split(r):
            parts.append(axes[..., at : at + width] @ mx.array(hadamard(width)))
            at += width
        return {"basis": mx.contiguous(mx.concatenate(parts, axis=-1).astype(mx.float16))}

    def fit(self, x: mx.array) -> Codes:
        return self.arrange(self.learn(sampled(x)), (x.shape[2] - 1) // ROWS_PER_LATENT)

    def bind(self, fitted: Codes) -> GroupLatents:
        return self.bound(fitted["basis"])

    def bound(self, basis: mx.array, offset: mx.array | None = None) -> GroupLatents:
        """This codec with a basis of ``arrange``; ``offset`` ``(1, H, 1, D)`` float32 is taken out of rows before."""
        bound = copy.copy(self)
        bound.fit_rows, bound._basis, bound._offset = 0, basis, offset
        bound._heads = HeadGroups(basis.shape[1], self._groups)
        bound._tiers = [
            (name, Half() if bits == FLOAT else Snug(bits, self._group, dim=width))
            for name, (bits, width) in zip("ab", self._split(basis.shape[3]), strict=False)
        ]
        bound.layout = {f"{name}_{part}": axis for name, tier in bound._tiers for part, axis in tier.layout.items()}
        return bound

    def _split(self, r: int) -> list[tuple[int, int]]:
        """Bits and number of the latents of each tier that has any."""
        first = r if self._bits[0] == self._bits[1] else ceil(self._share * r - 1e-9)
        return [(bits, n) for bits, n in zip(self._bits, (first, r - first), strict=True) if n]

    # --------------------------------------------------------------------------------------------------------- codes

    def take(self, codes: Codes, index: mx.array) -> Codes | None:
        """None: the heads of a group share their latents."""
        return None

    def _basis32(self) -> mx.array:
        assert self._basis is not None, "a basis comes with bound or bind"
        return self._basis.astype(mx.float32)

    def _side_by_side(self) -> mx.array:
        """The basis ``(B, G, size * D, r)``."""
        basis = self._heads.fill(self._basis32())
        return basis.reshape(basis.shape[0], self._heads.count, -1, basis.shape[3])

    def _of(self, codes: Codes) -> Iterator[tuple[Codec, Codes]]:
        for name, tier in self._tiers:
            yield tier, {part: codes[f"{name}_{part}"] for part in tier.layout}

    def encode(self, x: mx.array) -> Codes:
        rows = x.astype(mx.float32)
        rows = rows if self._offset is None else rows - self._offset
        z, at, out = self._heads.beside(rows) @ self._side_by_side(), 0, {}
        widths = [width for _, width in self._split(z.shape[3])]
        for (name, tier), width in zip(self._tiers, widths, strict=True):
            out |= {f"{name}_{part}": a for part, a in tier.encode(z[..., at : at + width]).items()}
            at += width
        return out

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        z = mx.concatenate([tier.decode(own) for tier, own in self._of(codes)], axis=-1)
        rows = self._heads.apart(z @ self._side_by_side().swapaxes(-1, -2))
        return cast(rows if self._offset is None else rows + self._offset, dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        """Queries meet the basis once; the latents are never expanded."""
        wide = q.astype(mx.float32)
        turned = self._heads.below(wide @ self._basis32())
        out, at = mx.zeros(()), 0
        for (tier, own), (_, width) in zip(self._of(codes), self._split(turned.shape[3]), strict=True):
            out = out + tier.scores(mx.contiguous(turned[..., at : at + width]), own)  # CUDA takes no views with gaps
            at += width
        out = self._heads.above(out)
        if self._offset is not None:
            out = out + wide @ self._offset.swapaxes(-1, -2)
        return out.astype(q.dtype)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        """Latents are summed; the sums are expanded, one per query row."""
        wide = p.astype(mx.float32)
        rows = self._heads.below(wide)
        z = mx.concatenate([tier.mix(rows, own) for tier, own in self._of(codes)], axis=-1)
        out = self._heads.above(z) @ self._basis32().swapaxes(-1, -2)
        if self._offset is not None:
            out = out + wide.sum(-1, keepdims=True) * self._offset
        return out.astype(p.dtype)
