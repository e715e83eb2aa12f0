"""What every benchmark shares: models, text, and results that say where they were measured."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from veloxquant_mlx import __version__
from veloxquant_mlx.cli.demo import passage
from veloxquant_mlx.models.gguf import ensure_model

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MIB = 2**20

# Configurations whose speed and memory are measured, by the name of their row.
CACHES: dict[str, dict[str, Any]] = {
    "kivi 4-bit": {"method": "kivi", "bit_width_inlier": 4},
    "kivi 2-bit": {"method": "kivi", "bit_width_inlier": 2},
    "turboquant_mse 4": {"method": "turboquant_mse", "bit_width_inlier": 4},
    "turboquant_mse 2": {"method": "turboquant_mse", "bit_width_inlier": 2},
    "turboquant_rvq 1": {"method": "turboquant_rvq", "bit_width_inlier": 1},
    "turboquant_rvq 2": {"method": "turboquant_rvq", "bit_width_inlier": 2},
}


def caches(*names: str) -> dict[str, dict[str, Any]]:
    """Those of ``CACHES``, in this order."""
    return {name: CACHES[name] for name in names}


def load(name: str) -> tuple[Any, list[int]]:
    """The model ``smollm2`` or ``gemma3`` in float32, and the committed texts as its token ids."""
    from mlx_lm import load as mlx_lm_load

    model, tokenizer, *_ = mlx_lm_load(str(ensure_model(name, ROOT / ".models", mx.float32)))
    sequel = (ROOT / "benchmarks" / "sequel.txt").read_text(encoding="utf-8")
    return model, list(tokenizer.encode(passage() + sequel.rstrip()))


def tokenizer(name: str) -> Any:
    """The tokenizer of the model ``smollm2`` or ``gemma3``."""
    from mlx_lm.utils import load_tokenizer

    return load_tokenizer(ensure_model(name, ROOT / ".models", mx.float32))


def machine() -> dict[str, Any]:
    """The machine and the versions that a number belongs to."""
    info = mx.device_info()
    return {
        "device": str(mx.default_device()).partition(",")[0].removeprefix("Device("),
        "name": info.get("device_name", info.get("architecture", platform.machine())),
        "cores": os.cpu_count(),
        "blas": _blas(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm", "numpy")},
        "veloxquant-mlx": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _blas() -> str:
    maps = Path("/proc/self/maps")
    if platform.system() == "Darwin":
        return "Accelerate"
    return "OpenBLAS" if maps.exists() and "openblas" in maps.read_text() else "MLX's own"


def save(name: str, settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows with machine and settings."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine(), "settings": settings, "rows": list(rows)}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the machine and the rows as a table."""
    where = machine()
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print(title)
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for first, *rest in cells:
        print("  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]))


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
