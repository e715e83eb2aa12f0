"""Runs kernels without a GPU: their sources as C++, lane by lane (``emulate.h``)."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from veloxquant_mlx.attention.kernels import launch
from veloxquant_mlx.attention.kernels.launch import Output, Program

HERE = Path(__file__).parent
TYPES = {
    mx.float32: "float",
    mx.float16: "half",
    mx.bfloat16: "bfloat",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
    mx.int32: "int32_t",
    mx.bool_: "bool",
}
NOTHING = {dtype: float("nan") for dtype in (mx.float32, mx.float16, mx.bfloat16)}


def source(program: Program, inputs: Sequence[mx.array], outputs: Sequence[Output]) -> str:
    """The C++ program of a kernel for arrays like these."""
    arrays = [(name, f"const {TYPES[a.dtype]}*") for name, a in zip(program.inputs, inputs, strict=True)]
    arrays += [(name, f"{TYPES[dtype]}*") for name, (_, dtype) in zip(program.outputs, outputs, strict=True)]
    taken = "".join(f"  {kind} {name} = ({kind})arrays[{i}];\n" for i, (name, kind) in enumerate(arrays))
    # what this file has of its own
    header = replace(program, headers=tuple(name for name in program.headers if name != "pairs.h")).header
    return (
        '#include "emulate.h"\n'
        + launch.whole(header)
        + f"static void kernel(void** arrays) {{\n{taken}{launch.whole(program.body)}}}\n"
        + 'extern "C" int run(void** arrays, int x, int y, int z, int threads, int backwards) {\n'
        + "  return guarded(kernel, arrays, x, y, z, threads, backwards ? -1 : 1);\n}\n"
    )


@cache
def compiler() -> tuple[str, Path]:
    """The compiler, and where programs are kept between runs, next to ``emulate.h`` in its precompiled form."""
    found = shutil.which("g++")
    assert found is not None, "kernels are tested as C++ programs: install g++"
    text = (HERE / "emulate.h").read_bytes()
    folder = HERE.parents[1] / ".pytest_cache" / "kernels" / hashlib.sha256(text).hexdigest()[:16]
    header = folder / "emulate.h"
    if not header.exists():
        folder.mkdir(parents=True, exist_ok=True)
        first = folder / f"{os.getpid()}.h"
        first.write_bytes(text)
        compiled(found, first, folder / "emulate.h.gch")
        first.rename(header)
    return found, folder


def compiled(compiler: str, code: Path, into: Path, *options: str) -> None:
    """Compile ``code``; other processes see a complete file or none."""
    partial = into.with_suffix(f".{os.getpid()}")
    command = [compiler, "-std=c++17", "-O1", "-w", "-fPIC", *options, str(code), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    partial.rename(into)


@cache
def built(program: str) -> ctypes.CDLL:
    """The compiled program."""
    found, folder = compiler()
    library = folder / f"{hashlib.sha256(program.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        code = library.with_suffix(f".{os.getpid()}.cpp")
        code.write_text(program)
        compiled(found, code, library, "-shared", f"-I{folder}")
        code.unlink()  # one that does not compile stays to be looked at
    return ctypes.CDLL(str(library))


def numbers(x: mx.array) -> np.ndarray:
    """The bytes of an array, which numpy cannot name where they are bfloat16."""
    x = mx.contiguous(x)
    return np.ascontiguousarray(np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x))


def guarded(x: np.ndarray) -> np.ndarray:
    """A copy whose end is the end of what memory may be touched."""
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), mmap.PAGESIZE, 0) == 0
    out = np.frombuffer(memory, x.dtype, x.size, size - x.nbytes).reshape(x.shape)
    out[...] = x
    return out


def run(
    program: Program,
    inputs: Sequence[mx.array],
    outputs: Sequence[Output],
    grid: tuple[int, int, int],
    backwards: bool = False,
) -> list[mx.array]:
    """What ``launch.run`` does; outputs hold NaN, integers 77 where the kernel wrote nothing.

    ``backwards`` lets the last lane of the last group run first: a kernel without races does not notice.
    """
    given = [guarded(numbers(a)) for a in inputs]
    made = [guarded(numbers(mx.full(shape, NOTHING.get(dtype, 77), dtype))) for shape, dtype in outputs]
    pointers = (ctypes.c_void_p * (len(given) + len(made)))(*(a.ctypes.data for a in (*given, *made)))
    inside = built(source(program, inputs, outputs)).run(pointers, *grid, 32 * program.warps, backwards)
    assert inside, f"{program.name} reads or writes beyond the end of an array"
    return [
        mx.array(a).view(dtype) if dtype == mx.bfloat16 else mx.array(a)
        for a, (_, dtype) in zip(made, outputs, strict=True)
    ]
