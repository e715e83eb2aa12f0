"""``veloxquant doctor``: what works on this machine, what is slow, and the remedy."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

import mlx.core as mx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..attention.kernels import launch
from ..cache.base import KVCacheBuilder, KVCacheConfig
from ..cache.registry import METHODS
from ..config import detect_hardware_info
from ..core.text import size

State = Literal["ok", "slow", "broken"]

# One core of 2015 with a tuned BLAS reaches 30 and more; the reference BLAS of MLX's Linux wheel about 2.
SLOW_GFLOPS = 15.0
OPENBLAS = (
    "MLX's own CPU BLAS is slow. On Debian or Ubuntu: apt-get install libopenblas0-pthread, then start Python with "
    "LD_PRELOAD=/usr/lib/$(uname -m)-linux-gnu/openblas-pthread/libopenblas.so.0"
)


@dataclass(frozen=True)
class Finding:
    """One line of the examination; ``remedy`` is empty where all is well."""

    name: str
    value: str
    state: State = "ok"
    remedy: str = ""


def examine() -> list[Finding]:
    """All findings, in the order in which a person would ask."""
    return [check() for check in (_versions, _back_end, _memory, _speed, _seam, _kernels, _methods)]


def show(findings: list[Finding], out: Console) -> None:
    """Print the findings, and below them what to do."""
    colours = {"ok": "green", "slow": "yellow", "broken": "bold red"}
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for finding in findings:
        state = Text(finding.state, colours[finding.state])
        table.add_row(Text(finding.name, "bold"), state, Text(finding.value, overflow="fold"))
    out.print(table)
    for finding in findings:
        if finding.remedy:
            out.print(
                Text.assemble("\n", (f"{finding.name}: ", colours[finding.state]), finding.remedy), soft_wrap=True
            )
    if all(finding.state == "ok" for finding in findings):
        out.print("\nEverything is fine.")


def _versions() -> Finding:
    packages = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return Finding("versions", f"veloxquant-mlx {__version__}, {packages}; {system}")


def _back_end() -> Finding:
    name = "Metal" if mx.metal.is_available() else "CUDA" if mx.cuda.is_available() else "CPU"
    device = mx.device_info().get("device_name", platform.processor() or platform.machine())
    remedy = ""
    if name == "Metal":
        remedy = (
            "no Metal device has run this version yet: every operation is MLX's own, but please report what you see"
        )
    if name != "CPU" and mx.default_device().type == mx.DeviceType.cpu:
        return Finding("back end", f"CPU, although {name} is there", "slow", "Call mx.set_default_device(mx.gpu).")
    return Finding("back end", f"{name} ({device})", "ok", remedy)


def _memory() -> Finding:
    found = detect_hardware_info()
    if found.total_memory_bytes is None:
        remedy = "The memory-pressure rule of auto-config does not apply; pass --memory."
        return Finding("memory", "unknown", "ok", remedy)
    return Finding("memory", f"{size(found.total_memory_bytes)}, {size(found.active_memory_bytes)} held by MLX")


def _speed() -> Finding:
    float32, float16 = _gflops(mx.float32), _gflops(mx.float16)
    value = f"{float32:,.0f} GFLOP/s in float32, {float16:,.0f} in float16"
    if mx.default_device().type != mx.DeviceType.cpu:
        return Finding("products", value)
    if float32 < SLOW_GFLOPS:
        return Finding("products", value, "slow", OPENBLAS)
    note = "Use float32 models on this CPU." if float16 < float32 / 3 else ""
    return Finding("products", value, "ok", note)


def _gflops(dtype: mx.Dtype, n: int = 512) -> float:
    """Speed of one matrix product, the best of three."""
    a = mx.random.normal((n, n), key=mx.random.key(0)).astype(dtype)
    mx.eval(a)
    return 2 * n**3 / min(_seconds(lambda: mx.eval(a @ a)) for _ in range(3)) / 1e9


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _seam() -> Finding:
    """Whether mlx_lm's attention reaches our caches, tried on a tiny model with random weights."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.models.llama import Model, ModelArgs

    from ..attention import hook

    args = ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        vocab_size=32,
        head_dim=32,
    )
    model, tokens = Model(args), mx.arange(24)[None]
    truth = model(tokens, cache=make_prompt_cache(model))
    # 24 tokens fit into the window of exact rows: nothing is quantised, so the results must agree.
    found = model(tokens, cache=KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi")))
    error = float(mx.abs(truth - found).max())
    if not hook.installed() or not error < 1e-3:
        remedy = "mlx_lm's attention does not reach the cache. Another package may have replaced it; report this."
        return Finding("seam", f"installed: {hook.installed()}, error {error:.1e}", "broken", remedy)
    return Finding("seam", f"mlx_lm's attention reaches the cache (error {error:.0e} on a tiny model)")


def _kernels() -> Finding:
    backend = launch.backend()
    if backend is None:
        return Finding("kernels", "none for the CPU: attention on packed data uses MLX's operations")
    return Finding("kernels", f"for {backend}, tried before first use; receipts say which layers they serve")


def _methods() -> Finding:
    return Finding("methods", f"{len(METHODS)}: {', '.join(METHODS)}")
