"""Kernels as data, and the machine that runs them: one source for Metal, CUDA and the emulation in the tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

WARPS = 4  # groups of 32 lanes that work together


@dataclass(frozen=True)
class Launch:
    """One run of the kernel ``source`` (a file here): ``defines`` are its constants, names run in order.

    ``grid`` counts groups of ``32 * warps`` lanes. ``outputs`` are shapes and dtypes by name.
    """

    source: str
    defines: Mapping[str, int | str]
    inputs: Mapping[str, mx.array]
    outputs: Mapping[str, tuple[tuple[int, ...], mx.Dtype]]
    grid: tuple[int, int, int]
    warps: int = WARPS
    shared: int = 0  # bytes of shared memory that the source calls POOL (CUDA)
    headers: tuple[str, ...] = field(default=("readers.h",))


@cache
def text(name: str) -> str:
    """A source of this folder."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def defined(defines: Iterable[tuple[str, int | str]]) -> str:
    """Constants as preprocessor lines."""
    return "".join(f"#define {name} {value}\n" for name, value in defines)


def backend() -> str | None:
    """``cuda`` or ``metal``; None where arrays live on the CPU, which has no kernels."""
    if mx.default_device() != mx.gpu:
        return None
    return "cuda" if mx.cuda.is_available() else "metal"


@cache
def _kernel(
    back: str,
    source: str,
    headers: tuple[str, ...],
    defines: tuple[tuple[str, int | str], ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    dtypes: tuple[mx.Dtype, ...],
    shared: int,
) -> Any:
    header = text(f"{back}.h") + defined(defines) + "".join(map(text, headers))
    body = text(f"{back}_lanes.h") + text(source)
    # MLX knows compiled kernels by their names, whatever the dtypes of their arrays.
    key = hashlib.sha256((header + body + repr(dtypes)).encode()).hexdigest()[:16]
    name = f"veloxquant_{source.removesuffix('.h')}_{key}"
    names: dict[str, Any] = {"name": name, "input_names": inputs, "output_names": outputs}
    if back == "cuda":
        return mx.fast.cuda_kernel(**names, source=body, header=header, shared_memory=shared)
    return mx.fast.metal_kernel(**names, source=body, header=header)


def run(launch: Launch) -> list[mx.array]:
    """The outputs of a launch, lazy as all arrays; errors of the compiler come when they are evaluated."""
    back = backend()
    assert back is not None, "kernels need a GPU"
    defines = tuple(launch.defines.items())
    dtypes = tuple(a.dtype for a in launch.inputs.values())
    names = tuple(launch.inputs), tuple(launch.outputs)
    kernel = _kernel(back, launch.source, launch.headers, defines, *names, dtypes, launch.shared)
    x, y, z = launch.grid
    return kernel(
        inputs=list(launch.inputs.values()),
        grid=(x * 32 * launch.warps, y, z),
        threadgroup=(32 * launch.warps, 1, 1),
        output_shapes=[shape for shape, _ in launch.outputs.values()],
        output_dtypes=[dtype for _, dtype in launch.outputs.values()],
    )
