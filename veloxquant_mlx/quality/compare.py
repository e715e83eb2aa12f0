"""Many methods against the uncompressed cache on one model and one text, each a row with everything that is measured.

>>> found = compare(model, tokenizer, plans(["kivi", "snapkv"]), text)  # doctest: +SKIP
>>> [(row.label, row.bits, row.mean_kl) for row in found.rows]  # doctest: +SKIP

A row reads the text twice: as it is, for KL, bytes, speed and layer errors, and with facts planted in it, for needles
and copying. The uncompressed pass is shared. A method that fails is a row with its error.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from ..cache.base import KVCacheBuilder
from ..cache.files import fingerprint
from ..cache.layer import CompressedKVCache
from ..cache.report import CacheReport, cache_report
from ..calibrate.collect import Call, Watched, watched
from ..coordinators.reconstruction import remember_tokenizer
from ..core.exceptions import CacheInputError, CacheStateError, QuantizerConfigError
from ..models.inspect import cache_slots
from . import probes
from .measure import Reference, Run, bytes_16, relative_speed, store_as, teacher_force
from .measure import compare as difference
from .plans import Plan
from .results import KINDS, Comparison, Model, Needles, Row, Text, Uncompressed

__all__ = ["Comparison", "Model", "Needles", "Plan", "Row", "Text", "Uncompressed", "compare", "describe"]

STEP = 512  # tokens of a prompt at a time
PAIRS = 8  # steps with and without compression whose times are compared
SHARES = (0.25, 0.5, 1.0)  # of the context: lengths of the texts with needles

Progress = Callable[[str, int, int], None]
"""Called with the label of the row that is measured, its tokens done and its tokens in all."""
UNCOMPRESSED = "uncompressed"


def compare(
    model: Any,
    tokenizer: Any,
    plans: Sequence[Plan],
    text: str,
    *,
    name: str = "model",
    text_name: str = "text",
    ctx: int = 1024,
    scored: int = 64,
    seed: int = 0,
    depths: Sequence[float] = probes.DEPTHS,
    keys: Sequence[str] = probes.KEYS,
    before: Comparison | None = None,
    progress: Progress | None = None,
    done: Callable[[Comparison], None] | None = None,
) -> Comparison:
    """Measure every plan: ``ctx`` tokens of ``text`` as the prompt, then the predictions of the ``scored`` after it.

    Rows of ``before`` (an earlier comparison of the same model, text and versions) that succeeded are taken over. Its
    other rows are kept. ``done`` is called after every row, for files and tables. No ``keys``: no needles, no copying.
    Raises ``CacheInputError`` for a text that is too short and ``QuantizerConfigError`` for a ``before`` that differs.
    """
    tokens = list(tokenizer.encode(text))
    if ctx < 1 or scored < 2:
        raise CacheInputError(f"ctx={ctx}, scored={scored} cannot be used: ctx must be at least 1, scored at least 2.")
    if len(tokens) < ctx + scored:
        raise CacheInputError(
            f"the text {text_name!r} has {len(tokens)} tokens, but ctx={ctx} and {scored} scored ones need "
            f"{ctx + scored}. Give a longer text or a smaller ctx."
        )
    remember_tokenizer(model, tokenizer)
    found = describe(model, text, len(tokens), name=name, text_name=text_name, ctx=ctx, scored=scored, seed=seed)
    if before is not None:
        check_same(found, before)
        found = replace(found, uncompressed=before.uncompressed, rows=before.rows)
    known = {_key(row): row for row in found.rows if row.error is None}
    wanted = [plan for plan in plans if _key(plan) not in known]
    if not wanted:
        return found
    bench = _Bench(model, tokenizer, text, tokens[: ctx + scored], found, depths, keys, progress)
    found = replace(found, uncompressed=bench.uncompressed())
    for plan in wanted:
        row = bench.row(plan)
        others = [other for other in found.rows if _key(other) != _key(row)]
        found = replace(found, rows=(*others, row))
        if done is not None:
            done(found)
    return found


def describe(model: Any, text: str, tokens: int, **about: Any) -> Comparison:
    """A comparison without rows; ``about``: its other settings, ``name`` of the model and ``text_name``."""
    from mlx_lm.utils import get_total_parameters

    layers = [slot.layer for slot in cache_slots(model) if slot.layer is not None]
    first = layers[0] if layers else None
    packages = ("veloxquant-mlx", "mlx", "mlx-lm", "numpy")
    info = mx.device_info()
    device = "CPU" if mx.default_device().type == mx.DeviceType.cpu else "GPU"
    part = info.get("device_name", info.get("architecture", ""))
    where = [f"{device} {part}".strip(), f"{os.cpu_count()} cores", f"{platform.system()} {platform.machine()}"]
    return Comparison(
        model=Model(
            about.pop("name"),
            fingerprint(model),
            len(layers),
            (first and first.kv_heads) or 0,
            first.head_dim if first else 0,
            int(get_total_parameters(model)),
        ),
        text=Text(about.pop("text_name"), hashlib.sha256(text.encode()).hexdigest(), tokens),
        versions={"python": platform.python_version(), **{name: _version(name) for name in packages}},
        machine=", ".join(where),
        **about,
    )


def check_same(now: Comparison, before: Comparison) -> None:
    """``QuantizerConfigError`` unless rows of ``before`` can stand beside rows of ``now``."""
    pairs = {
        "model": (before.model.fingerprint[:12], now.model.fingerprint[:12]),
        "text": (before.text.sha256[:12], now.text.sha256[:12]),
        **{key: (getattr(before, key), getattr(now, key)) for key in ("ctx", "scored", "seed")},
        **{key: (before.versions.get(key), value) for key, value in now.versions.items()},
    }
    if different := [f"{key} {old}, now {new}" for key, (old, new) in pairs.items() if old != new]:
        raise QuantizerConfigError(
            f"the results that are there cannot be continued: they were measured otherwise ({'; '.join(different)}). "
            "Write to another folder, or remove them."
        )


def _version(name: str) -> str:
    from .. import __version__

    return __version__ if name == "veloxquant-mlx" else version(name)


def _key(row: Row | Plan) -> tuple[str, str, str]:
    return row.label, row.method, json.dumps(dict(row.fields), sort_keys=True)


@dataclass(frozen=True)
class _Truth:
    """The uncompressed pass, its attention outputs by layer and the dtype that others hold keys and values in."""

    reference: Reference
    outputs: dict[int, list[mx.array]]
    dtype: mx.Dtype | None
    answers: list[probes.Answers]


class _Bench:
    """Measures the uncompressed cache once and every plan against it."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        text: str,
        tokens: list[int],
        about: Comparison,
        depths: Sequence[float],
        keys: Sequence[str],
        progress: Progress | None,
    ) -> None:
        self.model, self.tokens, self.about = model, tokens, about
        self.depths, self.keys = tuple(depths), tuple(keys)
        self.notes: tuple[str, ...] = ()
        self.trials: list[probes.Trial] = []
        for length in sorted({int(share * about.ctx) for share in SHARES} if keys else ()):
            try:
                self.trials.append(probes.build(tokenizer, text, length, depths=depths, keys=keys, seed=about.seed))
            except CacheInputError as error:  # too short for them; a longer one may do
                self.notes = (str(error),)
        if self.trials:
            self.notes = ()
        self.slots = [slot.index for slot in cache_slots(model) if slot.layer is not None]
        self.total = len(tokens) - 1 + sum(map(probes.tokens_of, self.trials)) + 2 * (PAIRS + 1)
        self.progress = progress or (lambda label, done, total: None)
        self.label, self.count = UNCOMPRESSED, 0

    def uncompressed(self) -> Uncompressed:
        """Run the model with its own caches; every row is compared with that."""
        self._start(UNCOMPRESSED)
        outputs: dict[int, list[mx.array]] = {index: [] for index in self.slots}

        def watching(index: int) -> Callable[[Call], None]:
            return lambda call: outputs[index].append(call.output) if call.output.shape[2] == 1 else None

        caches = watched(self.model, {index: watching(index) for index in self.slots})
        run = self._pass(caches)
        plain = [_plain(cache) for cache in caches]
        truth = Reference(run, bytes_16(plain), plain)
        answers = self._probed(lambda: [slot.native for slot in cache_slots(self.model)])
        # A float32 model keeps its keys and values in 16 bits, as the same model in 16 bits would.
        keys = [getattr(cache, "keys", None) for cache in plain]
        wide = any(isinstance(array, mx.array) and array.dtype == mx.float32 for array in keys)
        self.truth = _Truth(truth, outputs, mx.float16 if wide else None, answers)
        self._advance(self.total - self.count)
        return Uncompressed(
            perplexity=float(np.exp(self._nll(run))),
            needle=self._needles(answers),
            copy=_copied(answers),
            decode_speed=run.decode_tokens_per_second,
            prefill_peak=run.prefill_peak,
        )

    def row(self, plan: Plan) -> Row:
        """The row of ``plan``; whatever it raises is in the row."""
        self._start(plan.label)
        began, base = time.perf_counter(), Row(plan.label, plan.method, plan.family, dict(plan.fields))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", UserWarning)
            try:
                row = self._measured(plan, base)
            except Exception as error:  # a method may fail in any way: the others are still to be measured
                row = replace(base, error=f"{type(error).__name__}: {' '.join(str(error).split())}")
        mx.clear_cache()
        told = [" ".join(str(warning.message).split()) for warning in warned]
        notes = tuple(dict.fromkeys([*row.notes, *told, *self.notes]))
        return replace(row, notes=notes, seconds=time.perf_counter() - began)

    def _measured(self, plan: Plan, row: Row) -> Row:
        config, truth = plan.config(), self.truth

        def make() -> list[Any]:
            caches = KVCacheBuilder.for_model(self.model, config, serve_standalone=True)
            if truth.dtype is not None:
                store_as(caches, truth.dtype)
            return caches

        caches = make()
        with _recorded(caches) as outputs:
            run = self._pass(caches)
        if not np.isfinite(run.logprobs).all():
            raise CacheStateError("the predictions are not finite numbers")
        lost, report = difference(truth.reference, run), cache_report(caches)
        errors = tuple(_error(truth.outputs[index], outputs.get(index, [])) for index in self.slots)
        answers = self._probed(make)
        speed = relative_speed(self.model, self.tokens[-1], truth.reference.caches, caches, PAIRS)
        self._advance(self.total - self.count)
        copied, peak = _copied(truth.answers), truth.reference.run.prefill_peak
        return replace(
            row,
            bytes={kind: sum(getattr(layer, kind) for layer in report.layers) for kind in KINDS},
            bytes_16=truth.reference.bytes_16,
            bits=_bits(report),
            ratio=lost.ratio,
            mean_kl=lost.mean_kl,
            p99_kl=lost.p99_kl,
            top1_flips=1 - lost.top1_agreement,
            perplexity_ratio=float(np.exp(self._nll(run) - self._nll(truth.reference.run))),
            needle=self._needles(answers),
            copy=_copied(answers) / copied if copied else None,  # type: ignore[operator]
            decode_speed=speed,
            prefill_peak=run.prefill_peak / peak if run.prefill_peak and peak else None,
            layer_error=errors,
            notes=tuple(dict.fromkeys(note for layer in report.layers for note in layer.notes)),
        )

    def _pass(self, caches: list[Any]) -> Run:
        start = self.count

        def told(at: int, _: int) -> None:
            self._advance(start + at - self.count)

        return teacher_force(self.model, self.tokens, caches, self.about.ctx, step=STEP, progress=told)

    def _probed(self, make: Callable[[], list[Any]]) -> list[probes.Answers]:
        return [probes.run(self.model, make(), trial, step=STEP, progress=self._advance) for trial in self.trials]

    def _needles(self, answers: list[probes.Answers]) -> Needles | None:
        if not answers:
            return None
        lengths = tuple(len(trial.prompt) for trial in self.trials)
        return Needles(lengths, self.depths, self.keys, tuple(answer.needles for answer in answers))

    def _nll(self, run: Run) -> float:
        """Mean negative log-likelihood of the tokens that really come."""
        target = np.array(self.tokens[self.about.ctx :])
        return float(-run.logprobs[np.arange(len(target)), target].astype(np.float64).mean())

    def _start(self, label: str) -> None:
        self.label, self.count = label, 0
        self.progress(label, 0, self.total)

    def _advance(self, tokens: int) -> None:
        self.count += tokens
        self.progress(self.label, self.count, self.total)


def _plain(cache: Any) -> Any:
    """mlx_lm's own cache with what a watched one holds."""
    if not isinstance(cache, Watched):
        return cache
    plain = KVCache()
    plain.state = cache.state
    return plain


def _copied(answers: list[probes.Answers]) -> float | None:
    return sum(answer.repeat for answer in answers) / len(answers) if answers else None


def _bits(report: CacheReport) -> float | None:
    """Bits held per number over the compressed layers."""
    ours = [layer for layer in report.layers if layer.uncompressed]
    numbers = sum(layer.uncompressed for layer in ours) // 2
    return 8 * sum(layer.nbytes for layer in ours) / numbers if numbers else None


def _error(exact: list[mx.array], found: list[mx.array]) -> float | None:
    """The relative error of ``found``, None where a layer showed nothing."""
    if not exact or len(exact) != len(found):
        return None
    a, b = (mx.concatenate([x.astype(mx.float32) for x in xs], axis=2) for xs in (exact, found))
    return float(np.array(mx.sqrt(mx.sum((a - b) ** 2) / mx.sum(a**2))))


@contextmanager
def _recorded(caches: list[Any]) -> Iterator[dict[int, list[mx.array]]]:
    """The attention outputs of single-token steps by entry of the list; of layers that share rows, the first's."""
    outputs: dict[int, list[mx.array]] = {}
    ours = {i: cache for i, cache in enumerate(caches) if isinstance(cache, CompressedKVCache)}
    classes: dict[int, Any] = {i: type(cache) for i, cache in ours.items()}
    for i, cache in ours.items():
        outputs[i] = cache._outputs = []  # type: ignore[attr-defined]
        cache.__class__ = _recording(classes[i])
    try:
        yield outputs
    finally:
        for i, cache in ours.items():
            cache.__class__ = classes[i]
            del cache._outputs  # type: ignore[attr-defined]


@functools.cache
def _recording(cls: type[Any]) -> type:
    """``cls`` under its own name, whose first attention after every update of one token is kept."""

    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        self._fresh = keys.shape[2] == 1
        return cls.update_and_fetch(self, keys, values)

    def attend(self: Any, queries: mx.array, **how: Any) -> mx.array:
        out: mx.array = cls.attend(self, queries, **how)
        if self._fresh:
            self._fresh = False
            self._outputs.append(out)
        return out

    return type(cls.__name__, (cls,), {"update_and_fetch": update_and_fetch, "attend": attend})
