"""Runs kernels without a GPU: their sources as C++, lane by lane (``emulate.h``)."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import gettempdir

import mlx.core as mx
import numpy as np

from veloxquant_mlx.attention.kernels import launch
from veloxquant_mlx.attention.kernels.launch import Launch

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


def source(job: Launch) -> str:
    """The C++ program of one launch."""
    arrays = [(name, f"const {TYPES[a.dtype]}*") for name, a in job.inputs.items()]
    arrays += [(name, f"{TYPES[dtype]}*") for name, (_, dtype) in job.outputs.items()]
    taken = "".join(f"  {kind} {name} = ({kind})arrays[{i}];\n" for i, (name, kind) in enumerate(arrays))
    return (
        '#include "emulate.h"\n'
        + launch.defined(job)
        + "".join(map(launch.text, job.headers))
        + f"static void kernel(void** arrays) {{\n{taken}{launch.text(job.source)}}}\n"
        + 'extern "C" void run(void** arrays, int x, int y, int z, int threads) {\n'
        + "  launch(kernel, arrays, x, y, z, threads);\n}\n"
    )


@cache
def built(program: str) -> ctypes.CDLL:
    """The compiled program; programs are kept between runs."""
    compiler = shutil.which("g++")
    assert compiler is not None, "the emulation of kernels needs g++"
    key = hashlib.sha256((program + (HERE / "emulate.h").read_text()).encode()).hexdigest()[:24]
    folder = Path(gettempdir()) / "veloxquant-kernels"
    folder.mkdir(exist_ok=True)
    library = folder / f"{key}.so"
    if not library.exists():
        code, partial = folder / f"{key}.cpp", folder / f"{key}.{id(program)}.so"
        code.write_text(program)
        command = [compiler, "-std=c++17", "-O1", "-w", "-fPIC", "-shared", f"-I{HERE}", str(code), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        partial.rename(library)
    return ctypes.CDLL(str(library))


def numbers(x: mx.array) -> np.ndarray:
    """The bytes of an array, which numpy cannot name where they are bfloat16."""
    x = mx.contiguous(x)
    return np.ascontiguousarray(np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x))


def run(job: Launch) -> list[mx.array]:
    """What ``launch.run`` does; outputs hold NaN where the kernel wrote nothing."""
    given = [numbers(a) for a in job.inputs.values()]
    made = []
    for shape, dtype in job.outputs.values():
        made.append(numbers(mx.full(shape, float("nan"), dtype)).copy())
    pointers = (ctypes.c_void_p * (len(given) + len(made)))(*(a.ctypes.data for a in (*given, *made)))
    built(source(job)).run(pointers, *job.grid, 32 * job.warps)
    return [
        mx.array(a).view(dtype) if dtype == mx.bfloat16 else mx.array(a)
        for a, (_, dtype) in zip(made, job.outputs.values(), strict=True)
    ]
