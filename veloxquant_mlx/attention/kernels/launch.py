"""Kernels as data, and the machine that runs them: one source for Metal, CUDA and the emulation in the tests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx

FOLDER = files("veloxquant_mlx.attention.kernels")
INCLUDE = re.compile(r'#include "(\w+\.h)"')

Output = tuple[tuple[int, ...], mx.Dtype]


@dataclass(eq=False)
class Program:
    """A kernel: ``body`` with its constants, made once and run many times by groups of ``32 * warps`` lanes.

    It is compiled for the dtypes of the arrays that it first gets, and all others must have the same. ``headers`` are
    sources of this folder; ``shared`` are the bytes of what the source calls POOL (CUDA).
    """

    name: str
    body: str
    defines: dict[str, int | str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    warps: int
    headers: tuple[str, ...] = ("readers.h",)
    shared: int = 0
    compiled: Callable[..., list[mx.array]] | None = None

    @property
    def header(self) -> str:
        """The constants as preprocessor lines, and the headers."""
        constants = "".join(f"#define {name} {value}\n" for name, value in self.defines.items())
        return constants + "".join(f'#include "{name}"\n' for name in self.headers)


@cache
def text(name: str) -> str:
    """A source of this folder."""
    return FOLDER.joinpath(name).read_text(encoding="utf-8")


def whole(source: str) -> str:
    """``source`` with the sources of this folder that it includes."""
    return INCLUDE.sub(lambda found: text(found[1]), source)


def _pointed(source: str) -> str:
    """``source`` with the places of the sources that it includes, where they have one that a line can name."""
    folder = FOLDER
    if not isinstance(folder, Path) or '"' in str(folder):
        return whole(source)
    return INCLUDE.sub(lambda found: f'#include "{folder.as_posix()}/{found[1]}"', source)


def backend() -> str | None:
    """``cuda`` or ``metal``; None where arrays live on the CPU, which has no kernels."""
    if mx.default_device() != mx.gpu:
        return None
    return "cuda" if mx.cuda.is_available() else "metal"


def _compiled(back: str, program: Program, dtypes: tuple[mx.Dtype, ...]) -> Callable[..., list[mx.array]]:
    header = f'#include "{back}.h"\n{program.header}'
    body = f'#include "{back}_lanes.h"\n{program.body}'
    # MLX knows compiled kernels by their names, whatever the dtypes of their arrays.
    key = hashlib.sha256((whole(header + body) + repr(dtypes)).encode()).hexdigest()[:16]
    # It copies the text at every call: the compiler of CUDA can look up itself what is included.
    given = _pointed if back == "cuda" else whole
    names: dict[str, Any] = {"name": f"veloxquant_{program.name}_{key}", "source": given(body), "header": given(header)}
    names |= {"input_names": program.inputs, "output_names": program.outputs}
    kernel: Any
    if back == "cuda":
        kernel = mx.fast.cuda_kernel(**names, shared_memory=program.shared)
    else:
        kernel = mx.fast.metal_kernel(**names)
    return kernel


def run(
    program: Program, inputs: Sequence[mx.array], outputs: Sequence[Output], grid: tuple[int, int, int]
) -> list[mx.array]:
    """What ``program`` makes, lazy as all arrays; errors of the compiler come when it is evaluated.

    ``grid`` counts groups of lanes.
    """
    kernel = program.compiled
    if kernel is None:
        back = backend()
        assert back is not None, "kernels need a GPU"
        kernel = program.compiled = _compiled(back, program, tuple([a.dtype for a in inputs]))
    x, y, z = grid
    return kernel(
        inputs=inputs,
        grid=(x * 32 * program.warps, y, z),
        threadgroup=(32 * program.warps, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )
