"""Kernels as data, and the machine that runs them: one source for Metal, CUDA and the emulation in the tests."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

COMMENT = re.compile(r"//.*")
BEFORE_BREAK = re.compile(r"\s+\\$")
CONDITION = re.compile(r"#\s*(?:el)?if (\w+)(?: (==|!=|>) (\w+))?$")
COMPARE = {"==": operator.eq, "!=": operator.ne, ">": operator.gt}

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

    def texts(self) -> tuple[str, str]:
        """Headers with the constants, and the body: no more of them than these constants leave.

        MLX copies the text at every call.
        """
        constants = "".join(f"#define {name} {value}\n" for name, value in self.defines.items())
        headers = "".join(map(text, self.headers))
        return constants + shortened(headers, self.defines), shortened(self.body, self.defines)


@cache
def text(name: str) -> str:
    """A source of this folder."""
    return files("veloxquant_mlx.attention.kernels").joinpath(name).read_text(encoding="utf-8")


def shortened(source: str, defines: dict[str, int | str]) -> str:
    """``source`` without comments, indents and the branches that ``defines`` rule out.

    Conditions that compare anything else than constants stay, with their branches.
    """
    out: list[str] = []
    # One entry for each #if around a line: whether the branch is taken, whether one was; None where it stays as it is.
    around: list[tuple[bool, bool] | None] = []
    for full in source.splitlines():
        line = BEFORE_BREAK.sub(r" \\", COMMENT.sub("", full).strip())
        taken = all(entry is None or entry[0] for entry in around)
        if line.startswith("#if"):
            true = _true(line, defines) if taken else False
            around.append(None if true is None else (true, true))
            if true is not None:
                continue
        elif line.startswith(("#el", "#endif")) and (entry := around.pop()) is not None:
            was = entry[1]
            if not line.startswith("#endif"):
                true = not was and (line == "#else" or _true(line, defines))
                assert true is not None, f"{line} follows a condition of constants"
                around.append((true, was or true))
            continue
        elif line.startswith("#el"):
            around.append(None)
        if line and taken:
            out.append(line + "\n")
    return "".join(out)


def _true(line: str, defines: dict[str, int | str]) -> bool | None:
    """Whether the condition of an #if or #elif is true; None if it is not about ``defines`` alone."""
    found = CONDITION.match(line)
    if found is None:
        return None
    name, sign, other = found.groups()
    a, b = defines.get(name), 0 if other is None else int(other) if other.isdigit() else defines.get(other)
    if not isinstance(a, int) or not isinstance(b, int):
        return None
    return COMPARE["!=" if sign is None else sign](a, b)


def backend() -> str | None:
    """``cuda`` or ``metal``; None where arrays live on the CPU, which has no kernels."""
    if mx.default_device() != mx.gpu:
        return None
    return "cuda" if mx.cuda.is_available() else "metal"


def _compiled(back: str, program: Program, dtypes: tuple[mx.Dtype, ...]) -> Callable[..., list[mx.array]]:
    header, body = program.texts()
    header, body = shortened(text(f"{back}.h"), {}) + header, shortened(text(f"{back}_lanes.h"), {}) + body
    # MLX knows compiled kernels by their names, whatever the dtypes of their arrays.
    key = hashlib.sha256((header + body + repr(dtypes)).encode()).hexdigest()[:16]
    names: dict[str, Any] = {"name": f"veloxquant_{program.name}_{key}", "source": body, "header": header}
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
