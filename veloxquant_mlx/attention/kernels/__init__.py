"""Kernels that attend on packed data, for Metal and CUDA: when they are used, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from ...core.exceptions import KernelUnavailableError
from . import decode, launch, sides, trust

if TYPE_CHECKING:
    from ...cache._flat import FlatConfig
    from ...cache.store import Store
    from ..masks import Mask

# Query rows per kv head up to which a call is a decoding step, perhaps of several sequences' worth of drafted tokens.
MOST_ROWS = 64
HALF = (mx.float16, mx.bfloat16)


class Kernels:
    """The kernels of one cache: what its configuration wants, and what was in the way.

    ``use_metal_kernels`` is about decoding steps (up to 64 query rows per kv head), on CUDA as on Metal: None takes a
    kernel where there is one, True insists on it, False never does. ``fused_sdpa`` is about more query rows (prompts),
    which otherwise go block by block: None takes the kernel, which holds no decoded block but is slower, where
    ``fused_sdpa_memory_bound`` says that memory counts, up to ``fused_sdpa_max_ctx`` rows.
    """

    def __init__(self, config: FlatConfig) -> None:
        self.decoding, self.prompts = config.use_metal_kernels, config.fused_sdpa
        self.most, self.sparing, self.dtype = config.fused_sdpa_max_ctx, config.fused_sdpa_memory_bound, config.dtype
        self.reasons: set[str] = set()
        self._plan: decode.Plan | None = None

    def again(self, store: Store, q: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array | None:
        """``attend`` to rows as they are stored, where the call is like the one before; None where it is not."""
        plan = self._plan
        if plan is None or not plan.fits(store, q, mask, sinks) or launch.backend() is None:
            return None
        return plan(q, scale, mask, sinks, plan.keys.stop + store.keys.tail.n)

    def attend(
        self, store: Store, q: mx.array, scale: float, mask: Mask, sinks: mx.array | None, plain: bool
    ) -> mx.array | None:
        """Attention of ``q`` ``(B, Hq, L, D)`` by kernels, None where there is no way or no wish.

        ``plain``: all rows take part as they are stored. Raises KernelUnavailableError where the configuration insists.
        """
        few = q.shape[1] * q.shape[2] // store.keys.heads <= MOST_ROWS
        if self.decoding is False or not (few or self._takes_prompts(store.n)):
            return None
        insists = self.decoding is True if few else self.prompts is True
        back = launch.backend()
        if back is None and not insists:
            return None  # the CPU has none, and nobody expects any
        if back is None:
            found = "no kernel for the CPU"
        elif not plain:
            found = "no kernel for rows that are changed or chosen on the way to attention"
        else:
            found = sides.sides(store, q.shape[-1])
        if not isinstance(found, str):
            half = (self.dtype or q.dtype) in HALF
            verdict = trust.verdict(store, *found, q, half)
            if verdict.reason is not None:
                self.reasons.add(verdict.reason)
            if verdict.works:
                plan = decode.Plan(*found, q, mask, sinks, half and verdict.half)
                self._plan = plan if few and all(side.lasting for side in found) else None
                for side in found:
                    side.codes = None  # arrays of now: the store makes others as it grows, and these would stay
                return plan(q, scale, mask, sinks, store.n)
            found = verdict.reason or ""
        self.reasons.add(found)
        if insists:
            field = "use_metal_kernels" if few else "fused_sdpa"
            raise KernelUnavailableError(f"{field}=True cannot be kept: {found}. Leave {field} at its default.")
        return None

    def _takes_prompts(self, n: int) -> bool:
        if self.prompts is False or (self.prompts is None and not self.sparing):
            return False
        if self.most is not None and n > self.most:
            self.reasons.add(f"prompts beyond fused_sdpa_max_ctx={self.most} rows go block by block")
            return False
        return True
