"""What a model holds per token, and what its weights take: read from its folder, the weights not loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..core.exceptions import ArtifactNotFoundError
from ..core.types import LayerInfo
from ..models.inspect import slot_shapes

INDEX = "model.safetensors.index.json"
ASSUMED = 2  # bytes of a weight, a key or a value where no weights are there to say


@dataclass(frozen=True)
class Own:
    """A layer that keeps the model's own cache of at most ``rows`` tokens, with so many ``numbers`` for each."""

    rows: int
    numbers: int


@dataclass(frozen=True)
class Shape:
    """A model as far as memory goes: ``layers`` are those that methods compress, ``own`` the others with a bound.

    ``itemsize`` is of a key or value, ``weights`` in bytes, ``most`` the longest context that the model was made for.
    ``notes`` say what is assumed and what is not counted.
    """

    name: str
    layers: tuple[LayerInfo, ...]
    own: tuple[Own, ...]
    parameters: int
    weights: int
    itemsize: int = ASSUMED
    most: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def kv_heads(self) -> int:
        """Of the first layer."""
        return self.layers[0].kv_heads or 1

    @property
    def head_dim(self) -> int:
        """Of the first layer."""
        return self.layers[0].head_dim

    def uncompressed(self, tokens: int) -> int:
        """Bytes of the model's own cache for so many tokens."""
        per_token = sum((layer.kv_heads or 1) * (layer.head_dim + layer.value_dim) for layer in self.layers)
        return tokens * per_token * self.itemsize + self.left_alone(tokens)

    def left_alone(self, tokens: int) -> int:
        """Bytes of it in the layers that no method compresses."""
        return self.itemsize * sum(min(tokens, own.rows) * own.numbers for own in self.own)


def read_shape(folder: str | Path, name: str | None = None) -> Shape:
    """The shape of the mlx_lm model in ``folder``; without weights there, from its ``config.json`` alone.

    Raises ``ArtifactNotFoundError`` where there is no model that mlx_lm knows.
    """
    from mlx_lm.utils import get_total_parameters, load_model

    folder = Path(folder)
    try:
        model, config = load_model(folder, lazy=True, strict=False)
    except Exception as error:  # a folder may hold anything
        raise ArtifactNotFoundError(
            f"model {str(folder)!r} cannot be read ({type(error).__name__}: {error}). Give the folder of an mlx_lm "
            "model: its config.json is enough."
        ) from error
    parameters, arrays = int(get_total_parameters(model)), _arrays(model)
    notes: list[str] = []
    weights, itemsize = sum(array.nbytes for array in arrays), ASSUMED
    if any(folder.glob("model*.safetensors")):
        itemsize = next(array.dtype.size for array in arrays if mx.issubdtype(array.dtype, mx.floating))
    else:
        weights, told = _without_weights(folder, parameters)
        notes.append(told)
    layers, own = [], []
    for slot, layer in slot_shapes(model):
        rows = getattr(slot.native, "max_size", None) or getattr(slot.native, "chunk_size", None)
        if slot.layer is not None:
            layers.append(slot.layer)
        elif layer is not None and isinstance(rows, int):
            own.append(Own(rows, (layer.kv_heads or 1) * (layer.head_dim + layer.value_dim)))
        else:
            notes.append(f"not counted: layers with {slot.reason}")
    most = (config.get("text_config") or config).get("max_position_embeddings")
    if most is not None:
        most = int(most)
    return Shape(
        name or folder.resolve().name,
        tuple(layers),
        tuple(own),
        parameters,
        weights,
        itemsize,
        most,
        tuple(dict.fromkeys(notes)),
    )


def _arrays(model: Any) -> list[mx.array]:
    return [array for _, array in tree_flatten(model.parameters()) if isinstance(array, mx.array)]


def _without_weights(folder: Path, parameters: int) -> tuple[int, str]:
    """Bytes of the weights and how they are known."""
    index: Any = folder / INDEX
    if index.is_file():
        total = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
        if isinstance(total, int):
            return total, f"no weights in the folder: their bytes are those that {INDEX} says"
    return ASSUMED * parameters, f"no weights in the folder: taken as {parameters:,} numbers of 16 bits"
