"""Sealed files: a JSON header and arrays in one safetensors file, both under one checksum, written whole or not at all.

Whoever reads one gets all of it or an error: damaged, truncated and foreign files and newer formats are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..core.exceptions import VeloxError

_SUM = "sha256"


@dataclass(frozen=True)
class Kind:
    """A kind of sealed file.

    ``key`` names its header in the metadata and ``version`` goes up with every change of meaning; ``writer``, ``error``
    and ``remedy`` are what people are told of a file that cannot be used.
    """

    key: str
    version: int
    writer: str
    error: type[VeloxError]
    remedy: str

    def write(self, path: str | Path, header: Mapping[str, Any], arrays: dict[str, mx.array]) -> None:
        """Write the file; an older one at ``path`` is replaced at the end."""
        text = json.dumps({"format": self.version, **header})
        target = Path(path)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".safetensors")
        os.close(handle)
        try:
            mx.save_safetensors(temporary, arrays, {self.key: text, _SUM: _checksum(text, arrays)})
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

    def read(self, path: str | Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """The header and the arrays of an existing file; raises ``error`` for one that was not written by ``write``."""
        try:
            loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
            arrays, metadata = loaded
        except (RuntimeError, ValueError) as error:  # UnicodeDecodeError is a ValueError
            raise self.error(
                f"{path} cannot be read as a safetensors file; it may be truncated. {self.remedy}"
            ) from error
        text = metadata.get(self.key)
        if text is None:
            raise self.error(f"{path} was not written by {self.writer}. {self.remedy}")
        if metadata.get(_SUM) != _checksum(text, arrays):
            raise self.error(f"{path} is damaged: its checksum does not match. {self.remedy}")
        header = json.loads(text)
        if header["format"] != self.version:
            raise self.error(
                f"{path} has format {header['format']}; this version reads {self.version}. "
                "Use the version that wrote it."
            )
        return header, arrays


def raw_bytes(array: mx.array) -> bytes:
    """The numbers of ``array`` as they lie in memory, in row order."""
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8)).tobytes() if array.size else b""


def _checksum(header: str, arrays: Mapping[str, mx.array]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(raw_bytes(array))
    return digest.hexdigest()
