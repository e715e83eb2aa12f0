"""Counters of the server, and the text of ``GET /metrics`` (the Prometheus text format)."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import mlx.core as mx

from .. import __version__
from .live import Held


class Metrics:
    """What was asked and answered since the start; every thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter(dict.fromkeys(("ok", "refused", "failed", "disconnected"), 0))
        self.tokens: Counter[str] = Counter(dict.fromkeys(("prompt", "prompt_cached", "generated"), 0))
        self.stored = Held()
        self.running = 0

    def begin(self) -> None:
        with self._lock:
            self.running += 1

    def end(self, outcome: str) -> None:
        with self._lock:
            self.running -= 1
            self.outcomes[outcome] += 1

    def count(self, **tokens: int) -> None:
        with self._lock:
            self.tokens.update(tokens)

    def store(self, caches: Held) -> None:
        with self._lock:
            self.stored += caches


def render(metrics: Metrics, engine: Any) -> str:
    """The text: one ``# HELP`` and ``# TYPE`` line and one or more values per figure."""
    live, age = engine.live.measure()
    ever, now = metrics.stored, engine.prompt_cache
    labels = {"method": engine.model_provider.method, "model": engine.cli_args.model, "version": __version__}
    info = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
    gauge, counter = "gauge", "counter"
    figures: list[tuple[str, str, str, dict[str, float]]] = [
        ("info", gauge, "What is served", {f"{{{info}}}": 1}),
        ("live_cache_bytes", gauge, "Bytes of the compressed caches of running requests", {"": live.compressed}),
        ("live_cache_16bit_bytes", gauge, "Bytes of 16-bit keys and values of their tokens", {"": live.uncompressed}),
        ("live_cache_times_smaller", gauge, "Of running requests, against 16 bits", {"": live.ratio}),
        ("live_native_cache_bytes", gauge, "Bytes of layers left to mlx_lm's own caches", {"": live.native}),
        ("live_cache_age_seconds", gauge, "How old the live figures are", {"": age}),
        ("prompt_cache_entries", gauge, "Caches kept for reuse", {"": len(now)}),
        ("prompt_cache_bytes", gauge, "Bytes of the caches kept for reuse", {"": now.nbytes}),
        ("stored_cache_bytes_total", counter, "Bytes of compressed caches put aside for reuse", {"": ever.compressed}),
        ("stored_cache_16bit_bytes_total", counter, "The same in 16 bits", {"": ever.uncompressed}),
        ("stored_cache_times_smaller", gauge, "Of everything put aside, against 16 bits", {"": ever.ratio}),
        ("requests_running", gauge, "Requests being answered", {"": metrics.running}),
        ("requests_total", counter, "Requests by outcome", _labelled("outcome", metrics.outcomes)),
        ("tokens_total", counter, "Tokens by kind", _labelled("kind", metrics.tokens)),
        ("mlx_active_memory_bytes", gauge, "Bytes of all arrays of the process", {"": mx.get_active_memory()}),
    ]
    lines = []
    for name, kind, text, values in figures:
        lines += [f"# HELP veloxquant_{name} {text}.", f"# TYPE veloxquant_{name} {kind}"]
        lines += [f"veloxquant_{name}{label} {value:.10g}" for label, value in values.items()]
    return "\n".join(lines) + "\n"


def _labelled(name: str, counts: Counter[str]) -> dict[str, float]:
    return {f'{{{name}="{key}"}}': count for key, count in counts.items()}


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
