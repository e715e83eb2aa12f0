"""Latents that the layers of a group share: what all of them say of a token is one short row.

xKV (Chang et al., arXiv 2503.18893).
"""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np

from .affine import ChannelAffine
from .base import F16_MAX, Axis, Codec, Codes, cast
from .basis import MOST_CHANNELS, TINY, leading_axes, sampled
from .headgroups import FLOAT, Half
from .joint import JointCodec, JointRows

LOST = 0.5  # a block whose relative error is larger keeps its rows
WORTH = 0.9  # of the rows: factors that take more are not worth their error


class SharedLatents(JointCodec):
    """``x_j ~ z B_j`` for the layers ``j`` of a group: one latent row ``z`` of ``r`` numbers per token.

    The rows of all heads and layers stand side by side, and ``B`` are the leading axes of that matrix over the rows of
    the fit, nothing centred. ``r`` is ``rank``, or the fewest that keep the share ``energy`` of the squared singular
    values; at most half the numbers of a row. Each sequence of a batch has its own axes. With ``bits`` below 16 every
    latent has min/max groups of ``group`` tokens. A block whose relative error, latents not yet quantised, exceeds 0.5
    keeps its rows, if it is also larger than that of every block of the fit; so does one with a latent that float16
    cannot hold. ``turned``: rows come in float32 because their positions were taken out; where they are kept, in
    float16.

    Fitted: ``m<j>.basis`` float16 ``(B, H, D, r)``, ``share`` of the energy and ``limit``, the largest squared relative
    error, float32 ``(B, 1)``; where factors would not pay, ``apart`` int32 (rank, numbers per row, rows) alone.

    Codes: those of ``ChannelAffine``, or float16 ``rows``, of the latents ``(B, 1, n, r)``, and ``kept`` uint8
    ``(B, blocks)``; the rows of kept blocks in ``m<j>.exact`` ``(kept, H, block, D)``, in the order of blocks, then
    sequences. Encoding waits for their number.
    """

    def __init__(
        self,
        bits: int,
        group: int,
        *,
        rank: int | None,
        energy: float,
        turned: bool = False,
        fit_rows: int = 0,
        members: int = 1,
        member: int = 0,
    ) -> None:
        super().__init__(members, member)
        self.fit_rows, self._rank, self._energy, self._turned = fit_rows, rank, energy, turned
        self._latents: Codec = Half() if bits == FLOAT else ChannelAffine(bits, group)
        self.block = group if bits == FLOAT else self._latents.block
        wide = self.block // self._latents.block
        self.layout = {name: Axis(axis, slots * wide) for name, (axis, slots) in self._latents.layout.items()}
        self.layout["kept"] = Axis(1, 1)
        self._fitted: Codes = {}

    # ------------------------------------------------------------------------------------------------------- fitting

    def fit(self, x: mx.array) -> Codes:
        rows = _beside(x)
        some, (n, numbers) = sampled(rows), rows.shape[2:]
        total, most = mx.square(some).sum((-2, -1)), max(min(numbers // 2, n), 1)
        rank = min(self._rank or (most if numbers <= MOST_CHANNELS else numbers // 8), most)
        while True:  # no more axes are looked for than the energy asks
            axes, energy = leading_axes(some, rank)
            held = mx.cumsum(energy, axis=-1)
            if self._rank is not None:
                break
            short = int(np.array((held < self._energy * total[..., None] * (1 - 1e-6)).sum(-1).max()))
            if short < rank or rank == most:
                rank = min(short + 1, rank)
                break
            rank = min(2 * rank, most)
        if rank * (1 / numbers + 1 / n) >= WORTH:
            return {"apart": mx.array([rank, numbers, n], mx.int32)}
        # Row by row in memory: products of the same numbers in another order of memory round otherwise.
        basis = mx.contiguous(axes[..., :rank].reshape(*x.shape[:2], x.shape[3], rank).astype(mx.float16))
        bases = {f"m{j}.basis": part for j, part in enumerate(self.parts(basis))}
        lost = self._lost(rows, self._project(rows, bases))
        share = held[..., rank - 1] / mx.maximum(total, TINY)
        # A little more: the worst block itself comes again, and may round otherwise.
        return bases | {"share": share, "limit": mx.maximum(lost.max(-1, keepdims=True) * 1.001, LOST**2)}

    def bind(self, fitted: Codes) -> Codec:
        """This codec with what ``fit`` gave; reads, once, why rows stay as they are where they do."""
        if "apart" in fitted:
            rank, numbers, n = (int(i) for i in np.array(fitted["apart"]))
            why = f"as they came: {rank} latents for rows of {numbers} numbers, from {n} tokens, would save too little"
            return JointRows(self.members, self.member, why, mx.float16 if self._turned else None)
        bound = copy.copy(self)
        bound.fit_rows, bound._fitted = 0, fitted
        return bound

    def _project(self, rows: mx.array, fitted: Codes) -> mx.array:
        """Latents ``(B, 1, n, r)`` of the rows of all layers side by side."""
        bases = [fitted[f"m{j}.basis"] for j in range(self.members)]
        wide = mx.concatenate(bases, axis=1) if self.members > 1 else bases[0]
        return rows @ wide.astype(mx.float32).reshape(rows.shape[0], 1, rows.shape[3], -1)

    def _lost(self, rows: mx.array, z: mx.array) -> mx.array:
        """Squared relative errors ``(B, blocks)`` of the rows that latents ``z`` stand for."""

        def energy(y: mx.array) -> mx.array:
            each = mx.square(y).sum(-1)[:, 0]
            each = mx.pad(each, [(0, 0), (0, -each.shape[1] % self.block)])
            return each.reshape(each.shape[0], -1, self.block).sum(-1)

        return 1 - energy(z) / mx.maximum(energy(rows), TINY)  # axes are orthonormal

    # --------------------------------------------------------------------------------------------------------- codes

    def encode(self, x: mx.array) -> Codes:
        rows = _beside(x)
        z = self._project(rows, self._fitted)
        beyond = mx.abs(z).reshape(z.shape[0], -1, self.block * z.shape[3]).max(-1) > F16_MAX
        kept = (self._lost(rows, z) > self._fitted["limit"]) | beyond
        if not (flags := np.array(kept)).any():
            return {**self._latents.encode(z), "kept": kept.astype(mx.uint8)}
        z = mx.where(mx.repeat(kept, self.block, axis=1)[:, None, :, None], 0.0, z)
        codes = {**self._latents.encode(z), "kept": kept.astype(mx.uint8)}
        which = mx.array(np.flatnonzero(flags.T))
        for j, part in enumerate(self.parts(cast(x, mx.float16) if self._turned else x)):
            b, h, _, dim = part.shape
            blocks = part.reshape(b, h, -1, self.block, dim).transpose(2, 0, 1, 3, 4).reshape(-1, h, self.block, dim)
            codes[f"m{j}.exact"] = mx.take(blocks, which, axis=0)
        return codes

    def cut(self, codes: Codes, start: int, stop: int) -> Codes:
        """The codes of tokens ``start`` to ``stop``; waits where blocks are kept."""
        out = super().cut(codes, start, stop)
        first, last = start // self.block, stop // self.block
        for name in (name for name in codes if name.endswith(".exact")):
            flags = np.array(codes["kept"])
            low, high = int(flags[:, :first].sum()), int(flags[:, :last].sum())
            if low < high:
                out[name] = codes[name][low:high]
        return out

    def _of_latents(self, codes: Codes) -> Codes:
        return {name: codes[name] for name in self._latents.layout}

    @property
    def _basis(self) -> mx.array:
        return self._fitted[self.own("basis")].astype(mx.float32)

    def decode(self, codes: Codes, dtype: mx.Dtype = mx.float32) -> mx.array:
        return self.rows(codes, 0, self.n_tokens(codes), dtype)

    def rows(self, codes: Codes, start: int, stop: int, dtype: mx.Dtype = mx.float32) -> mx.array:
        low, high = start // self.block, -(-stop // self.block)
        some = super().cut(codes, low * self.block, high * self.block)
        z = self._latents.decode(self._of_latents(some))
        out = z @ self._basis.swapaxes(-1, -2)
        if (exact := codes.get(self.own("exact"))) is not None:
            flags = codes["kept"].T
            place = (mx.cumsum(flags.reshape(-1).astype(mx.int32)) - 1).reshape(flags.shape)[low:high]
            blocks = mx.take(exact, mx.maximum(place, 0), axis=0).transpose(1, 2, 0, 3, 4).reshape(out.shape)
            kept = mx.repeat(some["kept"] > 0, self.block, axis=1)[:, None, :, None]
            out = mx.where(kept, blocks.astype(out.dtype), out)
        return cast(out[:, :, start - low * self.block : stop - low * self.block], dtype)

    def scores(self, q: mx.array, codes: Codes) -> mx.array:
        wide = q.astype(mx.float32)
        out = self._latents.scores(_as_one_head(wide @ self._basis), self._of_latents(codes))
        out = out.reshape(*q.shape[:3], -1)
        if (exact := codes.get(self.own("exact"))) is not None:
            block, mine = self._places(codes, exact.shape[0], q.shape[0])
            dots = wide @ _in_a_row(exact).swapaxes(-1, -2)
            dots = dots.reshape(*q.shape[:3], -1, self.block) * mine[:, None, None, :, None]
            blocks = out.reshape(*q.shape[:3], -1, self.block)
            out = blocks.at[:, :, :, block].add(dots).reshape(out.shape)
        return out.astype(q.dtype)

    def mix(self, p: mx.array, codes: Codes) -> mx.array:
        wide = p.astype(mx.float32)
        z = self._latents.mix(_as_one_head(wide), self._of_latents(codes))
        out = z.reshape(*p.shape[:3], -1) @ self._basis.swapaxes(-1, -2)
        if (exact := codes.get(self.own("exact"))) is not None:
            block, mine = self._places(codes, exact.shape[0], p.shape[0])
            weights = mx.take(wide.reshape(*p.shape[:3], -1, self.block), block, axis=3)
            weights = (weights * mine[:, None, None, :, None]).reshape(*p.shape[:3], -1)
            out = out + weights @ _in_a_row(exact)
        return out.astype(p.dtype)

    def _places(self, codes: Codes, m: int, batch: int) -> tuple[mx.array, mx.array]:
        """The block ``(m,)`` of every kept one, and whose it is, ``(B, m)`` with a single 1 per column."""
        flags = codes["kept"].T.reshape(-1)
        at = mx.sort(mx.where(flags > 0, mx.arange(flags.size), flags.size))[:m]
        return at // batch, (mx.arange(batch)[:, None] == at % batch).astype(mx.float32)

    def remarks(self, codes: Codes) -> tuple[str, ...]:
        basis, share = self._fitted[self.own("basis")], float(self._fitted["share"].min())
        numbers = self.members * basis.shape[1] * basis.shape[2]
        found = f"{basis.shape[3]} latents for rows of {numbers} numbers keep {share:.1%} of their energy"
        exact = codes.get(self.own("exact"))
        if exact is None:
            return (found,)
        return (found, f"{exact.shape[0]} blocks of {self.block} tokens kept as they came: the latents miss them")


def _beside(x: mx.array) -> mx.array:
    """Rows ``(B, G H, n, D)`` side by side, ``(B, 1, n, G H D)`` float32."""
    b, h, n, dim = x.shape
    return x.astype(mx.float32).swapaxes(1, 2).reshape(b, 1, n, h * dim)


def _as_one_head(x: mx.array) -> mx.array:
    """``x`` ``(B, H, R, k)`` as ``(B, 1, H R, k)``."""
    return mx.contiguous(x.reshape(x.shape[0], 1, -1, x.shape[3]))  # CUDA takes no views with gaps


def _in_a_row(exact: mx.array) -> mx.array:
    """Kept rows ``(m, H, block, D)`` as ``(1, H, m block, D)`` float32."""
    m, h, block, dim = exact.shape
    return exact.astype(mx.float32).swapaxes(0, 1).reshape(1, h, m * block, dim)
