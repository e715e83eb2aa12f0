"""Teacher-forced comparison of a compressed cache with the uncompressed one.

Both read the same tokens; at every token after the prompt the two distributions over the next token are compared.
Bytes are counted on the arrays that the caches hold, never from bit widths.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..cache.report import cache_report
from ..core.exceptions import CacheInputError

Progress = Callable[[int, int], None]
"""Called with tokens done and tokens in all."""


@dataclass(frozen=True)
class Run:
    """One teacher-forced pass: ``logprobs`` ``(N, vocabulary)`` float32 of the N tokens after the prompt.

    ``prefill_peak`` is how far MLX's memory rose while the prompt was read, its end included; None where that cannot
    be told.
    """

    logprobs: np.ndarray
    kv_bytes: int
    active_growth: int
    prefill_seconds: float
    decode_seconds: float
    prefill_peak: int | None = None

    @property
    def decode_tokens_per_second(self) -> float:
        """Steps of one token, without the first, which still belongs to the prompt."""
        return (len(self.logprobs) - 1) / self.decode_seconds


@dataclass(frozen=True)
class Reference:
    """The pass with the model's own cache, and that cache at its end, to compare speeds with.

    ``bytes_16`` is what its keys and values take at 2 bytes a number.
    """

    run: Run
    bytes_16: int
    caches: list[Any]


@dataclass(frozen=True)
class Measurement:
    """A cache against the uncompressed one over the same tokens.

    ``kv_bytes`` are held at the end of the pass, ``ratio`` is how many times smaller that is than 16-bit K/V.
    KL divergences are in nats, from the uncompressed to the compressed distribution. ``relative_speed`` compares
    single-token steps at the end of the pass, taken in turn (None where only passes were compared: they ran at
    different times). ``active_growth`` is the growth of MLX's active memory over the pass.
    """

    tokens: int
    kv_bytes: int
    ratio: float
    mean_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float
    decode_tokens_per_second: float
    relative_speed: float | None
    prefill_seconds: float
    active_growth: int


def teacher_force(
    model: Any,
    tokens: Sequence[int],
    caches: list[Any],
    prompt_len: int,
    *,
    step: int = 2048,
    progress: Progress | None = None,
) -> Run:
    """Feed ``tokens`` as mlx_lm's ``generate_step`` would: the prompt in chunks of ``step``, the rest one by one.

    The last token of the prompt goes alone and the last token of all is only predicted. Raises ``CacheInputError``
    unless at least two tokens follow the prompt.
    """
    if not 1 <= prompt_len <= len(tokens) - 2:
        raise CacheInputError(
            f"prompt_len={prompt_len} cannot be used with {len(tokens)} tokens: it must be in 1..{len(tokens) - 2}. "
            "Give a prompt and at least two tokens after it."
        )
    ids, before = mx.array(list(tokens))[None], mx.get_active_memory()
    tell = progress or (lambda done, total: None)
    mx.reset_peak_memory()
    started, peak = time.perf_counter(), 0
    for start in range(0, prompt_len - 1, step):
        stop = min(start + step, prompt_len - 1)
        model(ids[:, start:stop], cache=caches)
        mx.eval([c.state for c in caches])
        tell(stop, len(tokens) - 1)
    logits, seconds = [], []
    for i in range(prompt_len - 1, len(tokens) - 1):
        began = time.perf_counter()
        row = model(ids[:, i : i + 1], cache=caches)[0, -1].astype(mx.float32)
        mx.eval(row)
        seconds.append(time.perf_counter() - began)
        peak = peak or mx.get_peak_memory()  # the first of these steps ends the prompt
        logits.append(np.array(row))
        tell(i + 1, len(tokens) - 1)
    mx.eval([c.state for c in caches])
    return Run(
        logprobs=_log_softmax(np.stack(logits)),
        kv_bytes=cache_report(caches).nbytes,
        active_growth=mx.get_active_memory() - before,
        prefill_seconds=time.perf_counter() - started - sum(seconds[1:]),
        decode_seconds=sum(seconds[1:]),
        prefill_peak=peak - before if peak > before else None,
    )


def reference(model: Any, tokens: Sequence[int], prompt_len: int, **kwargs: Any) -> Reference:
    """The pass with the cache that mlx_lm itself makes; keywords as in ``teacher_force``."""
    caches = make_prompt_cache(model)
    run = teacher_force(model, tokens, caches, prompt_len, **kwargs)
    return Reference(run, bytes_16(caches), caches)


def bytes_16(caches: list[Any]) -> int:
    """What the numbers in mlx_lm's own caches take at 2 bytes each."""
    return 2 * sum(_numbers_held(c) for c in caches)


def _numbers_held(cache: Any) -> int:
    """Numbers in the arrays of one of mlx_lm's caches, without the rows that its buffers keep in reserve."""
    arrays = [a for _, a in tree_flatten(cache.state) if isinstance(a, mx.array)]
    rows = getattr(cache, "offset", None)
    if rows is None:
        return sum(a.size for a in arrays)
    return sum(a.size // a.shape[2] * min(rows, a.shape[2]) for a in arrays)


def compare(truth: Reference, run: Run) -> Measurement:
    """What ``run`` lost and saved against ``truth``, over the same tokens."""
    p, q = truth.run.logprobs, run.logprobs
    if p.shape != q.shape:
        raise CacheInputError(f"the passes differ: {p.shape} and {q.shape} predictions. Feed both the same tokens.")
    # In float64: the terms of a small KL cancel to below float32's resolution.
    kl = np.array([np.exp(a) @ (a - b) for a, b in zip(p.astype(np.float64), q.astype(np.float64), strict=True)])
    return Measurement(
        tokens=len(kl),
        kv_bytes=run.kv_bytes,
        ratio=truth.bytes_16 / run.kv_bytes,
        mean_kl=float(kl.mean()),
        p99_kl=float(np.quantile(kl, 0.99)),
        max_kl=float(kl.max()),
        top1_agreement=float((p.argmax(-1) == q.argmax(-1)).mean()),
        decode_tokens_per_second=run.decode_tokens_per_second,
        relative_speed=None,
        prefill_seconds=run.prefill_seconds,
        active_growth=run.active_growth,
    )


def measure(
    model: Any,
    tokens: Sequence[int],
    make_caches: Callable[[], list[Any]],
    prompt_len: int,
    *,
    truth: Reference | None = None,
    kv_dtype: mx.Dtype | None = None,
    step: int = 2048,
    progress: Progress | None = None,
) -> Measurement:
    """Measure the caches that ``make_caches`` returns against the model's own.

    ``truth`` saves the uncompressed pass where it was made before. ``kv_dtype`` makes the caches receive K and V in
    that dtype: a float32 model on the CPU then holds what the same model in 16 bits would hold.
    """
    truth = truth or reference(model, tokens, prompt_len, step=step)
    caches = make_caches()
    if kv_dtype is not None:
        store_as(caches, kv_dtype)
    found = compare(truth, teacher_force(model, tokens, caches, prompt_len, step=step, progress=progress))
    return replace(found, relative_speed=relative_speed(model, tokens[-1], truth.caches, caches))


def relative_speed(model: Any, token: int, base: list[Any], caches: list[Any], pairs: int = 12) -> float:
    """How many times faster a single-token step is with ``caches`` than with ``base``: the median over pairs of steps.

    The steps are taken in turn, so that other work on the machine slows both alike, and on copies: neither list
    changes.
    """
    ids, rivals = mx.array([[token]]), (copy.deepcopy(base), copy.deepcopy(caches))
    ratios = []
    for _ in range(pairs + 1):
        seconds = []
        for rival in rivals:
            began = time.perf_counter()
            mx.eval(model(ids, cache=rival))
            seconds.append(time.perf_counter() - began)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[1:])  # the first pair grows buffers


def store_as(caches: list[Any], dtype: mx.Dtype) -> None:
    """Let every cache of the list receive its keys and values rounded to ``dtype``, copies of it included."""
    for cache in caches:
        cache.__class__ = _rounding(type(cache), dtype)


@functools.cache
def _rounding(cls: type[Any], dtype: mx.Dtype) -> type:
    """``cls`` under its own name, with rows rounded on arrival. A class, since copies would share a bound function."""

    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        return cls.update_and_fetch(self, keys.astype(dtype), values.astype(dtype))

    return type(cls.__name__, (cls,), {"update_and_fetch": update_and_fetch})


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
