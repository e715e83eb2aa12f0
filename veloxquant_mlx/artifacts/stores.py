"""Artifact stores: in memory, and as one ``.npy`` file per artifact."""

from __future__ import annotations

import os
import tempfile
from abc import abstractmethod
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mlx.core as mx
import numpy as np

from ..core.abstractions import ArtifactStore
from ..core.exceptions import ArtifactDamagedError, ArtifactNotFoundError, QuantizerConfigError

PARAMETERS = {"rotation": ("d", "seed"), "codebook": ("distribution", "b", "d"), "jl": ("d", "m", "seed")}


class _KeyedStore(ArtifactStore):
    """An ``ArtifactStore`` over two verbs on keys such as ``rotation-d128-seed42``."""

    @abstractmethod
    def _get(self, key: str) -> np.ndarray | None:
        """The array under ``key``, None if there is none."""

    @abstractmethod
    def _put(self, key: str, array: np.ndarray) -> None:
        """Keep ``array``; whoever reads meanwhile sees the old one or the new one, whole."""

    @abstractmethod
    def _has(self, key: str) -> bool: ...

    def load_rotation_matrix(self, d: int, seed: int) -> mx.array:
        return self._load("rotation", d=d, seed=seed)

    def save_rotation_matrix(self, Pi: mx.array, d: int, seed: int) -> None:
        self._save(Pi, "rotation", d=d, seed=seed)

    def load_codebook(self, distribution: str, b: int, d: int) -> mx.array:
        return self._load("codebook", distribution=distribution, b=b, d=d)

    def save_codebook(self, cb: mx.array, distribution: str, b: int, d: int) -> None:
        self._save(cb, "codebook", distribution=distribution, b=b, d=d)

    def load_jl_matrix(self, d: int, m: int, seed: int) -> mx.array:
        return self._load("jl", d=d, m=m, seed=seed)

    def save_jl_matrix(self, S: mx.array, d: int, m: int, seed: int) -> None:
        self._save(S, "jl", d=d, m=m, seed=seed)

    def exists(self, artifact_type: str, **kwargs: Any) -> bool:
        return self._has(_key(artifact_type, kwargs))

    def _load(self, artifact_type: str, **parameters: Any) -> mx.array:
        array = self._get(_key(artifact_type, parameters))
        if array is None:
            wanted = ", ".join(f"{name}={value!r}" for name, value in parameters.items())
            raise ArtifactNotFoundError(f"no {artifact_type} with {wanted} in {self!r}: save it there first.")
        return mx.array(array)

    def _save(self, array: mx.array, artifact_type: str, **parameters: Any) -> None:
        # numpy has no bfloat16; float32 holds every bfloat16 exactly.
        bf16 = isinstance(array, mx.array) and array.dtype == mx.bfloat16
        self._put(_key(artifact_type, parameters), np.array(array.astype(mx.float32) if bf16 else array))


def _key(artifact_type: str, parameters: dict[str, Any]) -> str:
    """A name that is safe in every file system: other characters than letters, digits and ``_.-~`` become ``%XX``."""
    names = PARAMETERS.get(artifact_type)
    if names is None:
        raise QuantizerConfigError(
            f"artifact_type={artifact_type!r} cannot be used: it must be one of {', '.join(map(repr, PARAMETERS))}."
        )
    if set(names) != set(parameters):
        raise QuantizerConfigError(
            f"{artifact_type} parameters {sorted(parameters)} cannot be used: they must be {', '.join(names)}."
        )
    return "-".join([artifact_type, *(name + quote(str(parameters[name]), safe="") for name in names)])


class InMemoryArtifactStore(_KeyedStore):
    """Keeps artifacts for as long as it lives."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def __repr__(self) -> str:
        return f"InMemoryArtifactStore({len(self._arrays)} artifacts)"

    def _get(self, key: str) -> np.ndarray | None:
        return self._arrays.get(key)

    def _put(self, key: str, array: np.ndarray) -> None:
        self._arrays[key] = array

    def _has(self, key: str) -> bool:
        return key in self._arrays


class NpyArtifactStore(_KeyedStore):
    """Keeps artifacts in ``root_dir``, one ``.npy`` file each, written whole or not at all."""

    def __init__(self, root_dir: str | os.PathLike[str]) -> None:
        self.root_dir = Path(root_dir)
        self.root_dir.mkdir(parents=True, exist_ok=True)

    def __repr__(self) -> str:
        return f"NpyArtifactStore({str(self.root_dir)!r})"

    def _path(self, key: str) -> Path:
        return self.root_dir / f"{key}.npy"

    def _get(self, key: str) -> np.ndarray | None:
        path = self._path(key)
        try:
            array = np.load(path, allow_pickle=False)
            if array.dtype.kind not in "fiub":
                raise ValueError(f"it holds {array.dtype}, not real numbers")
            return array
        except FileNotFoundError:
            return None
        except (ValueError, EOFError, OSError) as error:
            raise ArtifactDamagedError(
                f"artifact file {path} cannot be read ({error}): delete it and save it again."
            ) from error

    def _put(self, key: str, array: np.ndarray) -> None:
        handle, temporary = tempfile.mkstemp(suffix=".tmp", dir=self.root_dir)
        try:
            with os.fdopen(handle, "wb") as file:
                np.save(file, array, allow_pickle=False)
            os.replace(temporary, self._path(key))
        except BaseException:
            os.unlink(temporary)
            raise

    def _has(self, key: str) -> bool:
        return self._path(key).is_file()
