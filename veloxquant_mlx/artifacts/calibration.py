"""What a calibration run found: named arrays per layer for one method, tied to the model that they were measured on.

A ``CalibrationArtifact`` is an ``ArtifactStore``: it reaches a method as ``KVCacheConfig(method=..., store=artifact)``.

>>> artifact = CalibrationArtifact.load("filters.safetensors")  # doctest: +SKIP
>>> caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="qfilters", store=artifact))  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..core.exceptions import ArtifactDamagedError, ArtifactNotFoundError, QuantizerConfigError
from .sealed import Kind
from .stores import InMemoryArtifactStore

if TYPE_CHECKING:
    from ..cache._flat import FlatConfig
    from ..core.types import LayerInfo

_FILE = Kind(
    key="veloxquant_mlx.calibration",
    version=1,
    writer="CalibrationArtifact.save",
    error=ArtifactDamagedError,
    remedy="Make it again with: veloxquant calibrate",
)


@dataclass(frozen=True)
class ModelPrint:
    """How an artifact recognises its model: number of cache entries, digests of the weights and of the rotations.

    Weights that are quantised or tuned differently give other queries and keys, and so does another RoPE scaling.
    """

    model: str
    caches: int
    weights: str
    rope: str

    @classmethod
    def of(cls, model: Any) -> ModelPrint:
        from ..cache.files import fingerprint  # imports mlx_lm, which takes seconds
        from ..models.inspect import cache_slots
        from ..models.rope import Rotation

        slots, rope = cache_slots(model), hashlib.sha256()
        for slot in slots:
            turn = None if slot.layer is None else slot.layer.rope
            # Six digits: rates are measured in float32.
            rates = [f"{rate:.6e}" for rate in turn.rate] if isinstance(turn, Rotation) else [str(turn)]
            rope.update(f"{slot.index}: {' '.join(rates)}\n".encode())
        return cls(type(model).__module__, len(slots), fingerprint(model), rope.hexdigest())


class CalibrationArtifact(InMemoryArtifactStore):
    """Arrays per layer for ``method``; ``layers`` maps an index in the model's cache list to named arrays.

    ``model`` ties it to a model (None: to none), ``about`` says how it was made (JSON values: tokens, seed, …). As a
    store it also keeps rotations and codebooks, in memory only, like any other.
    """

    def __init__(
        self,
        method: str,
        layers: Mapping[int, Mapping[str, mx.array]],
        model: ModelPrint | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.method, self.model, self.about = method, model, dict(about or {})
        self._layers = {int(i): {name: mx.array(a) for name, a in arrays.items()} for i, arrays in layers.items()}

    def __repr__(self) -> str:
        return f"CalibrationArtifact({self.method!r}, {len(self._layers)} layers)"

    @property
    def indices(self) -> list[int]:
        """The entries of the model's cache list that it has arrays for."""
        return sorted(self._layers)

    def layer(self, index: int) -> dict[str, mx.array]:
        """The arrays of entry ``index`` of the cache list; ``ArtifactNotFoundError`` where there are none."""
        if index not in self._layers:
            raise ArtifactNotFoundError(
                f"{self!r} holds nothing for entry {index} of the cache list, only for {self.indices}. "
                "Calibrate on the model that it is used with."
            )
        return dict(self._layers[index])

    def save(self, path: str | Path) -> None:
        """Write one safetensors file with a manifest and a checksum, whole or not at all."""
        from .. import __version__  # methods import this module before the package has one

        header = {
            "method": self.method,
            "layers": self.indices,
            "model": None if self.model is None else asdict(self.model),
            "about": self.about,
            "version": __version__,
        }
        arrays = {f"{i}.{name}": a for i, named in self._layers.items() for name, a in named.items()}
        _FILE.write(path, header, arrays)

    @classmethod
    def load(cls, path: str | Path) -> CalibrationArtifact:
        """What ``save`` wrote. Raises ArtifactNotFoundError where no file is, ArtifactDamagedError for any other file.

        Whether it belongs to a model is tested by ``check_model``, which ``for_model`` calls.
        """
        if not Path(path).is_file():
            raise ArtifactNotFoundError(f"there is no calibration file {path}. Make one with: veloxquant calibrate")
        header, arrays = _FILE.read(path)
        layers: dict[int, dict[str, mx.array]] = {i: {} for i in header["layers"]}
        for name, array in arrays.items():
            index, _, own = name.partition(".")
            layers[int(index)][own] = array
        model = None if header["model"] is None else ModelPrint(**header["model"])
        return cls(header["method"], layers, model, header["about"])

    def check_model(self, model: Any) -> None:
        """Raise ``QuantizerConfigError`` unless it was made on ``model``: same weights, rotations and cache list."""
        if self.model is None:
            return
        now = ModelPrint.of(model)
        wrong = {
            "model": f"it is a {self.model.model}, this is a {now.model}",
            "caches": f"it has {self.model.caches} caches, this one {now.caches}",
            "weights": "its weights are others",
            "rope": "its positions turn at other rates",
        }
        for name, told in wrong.items():
            if getattr(self.model, name) != getattr(now, name):
                raise QuantizerConfigError(
                    f"store={self!r} was calibrated on another model: {told}. "
                    f"Run veloxquant calibrate --method {self.method} on this model."
                )


def _matches(size: int | None, found: int) -> bool:
    return size is None or size == found


def calibrated(config: FlatConfig, layer: LayerInfo, **shapes: tuple[int | None, ...]) -> dict[str, mx.array] | None:
    """The arrays named in ``shapes`` that ``config.store`` holds for ``layer``; None where it is no artifact.

    A size of None matches any. Raises QuantizerConfigError for an artifact of another method and for an array that is
    missing or has another shape; nothing is ever broadcast.
    """
    store = config.store
    if not isinstance(store, CalibrationArtifact):
        return None
    if store.method != config.method:
        raise QuantizerConfigError(
            f"store={store!r} cannot be used: it must be an artifact of {config.method!r}. "
            f"Make one with: veloxquant calibrate --method {config.method}"
        )
    held = store.layer(layer.index)
    for name, shape in shapes.items():
        found = held[name].shape if name in held else None
        if found is None or len(found) != len(shape) or not all(map(_matches, shape, found)):
            raise QuantizerConfigError(
                f"store={store!r} cannot be used for entry {layer.index} of the cache list: "
                f"{name!r} has shape {found}, it must be {shape}. Calibrate on the model that it is used with."
            )
    return {name: held[name] for name in shapes}
