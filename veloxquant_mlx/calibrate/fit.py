"""Makes the artifact of a method from a text: one entry of ``CALIBRATORS`` per method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..artifacts.calibration import CalibrationArtifact, ModelPrint
from ..core.types import LayerInfo
from ..methods._method import refuse
from .a2ats import a2ats_index
from .axes import kvtc_axes, spectral_axes
from .collect import Progress, Sample, collect, hooked_slots
from .palu import palu_axes
from .qfilters import ANISOTROPIC, query_filters
from .tiers import amc_axes
from .vecinfer import vecinfer_codebooks


@dataclass(frozen=True)
class Calibrator:
    """``wants``: parts of a ``Sample`` to collect; ``fit``: arrays of a layer by name, and remarks about it."""

    wants: tuple[str, ...]
    fit: Callable[[Sample, LayerInfo], tuple[dict[str, np.ndarray], list[str]]]


def _qfilters(sample: Sample, _: LayerInfo) -> tuple[dict[str, np.ndarray], list[str]]:
    filters, share = query_filters(sample.numpy("queries"), sample.kv_heads)
    weak = [
        f"layer {sample.index}, query head {head}: only {share[head]:.0%} of the queries on one side of their filter"
        for head in np.flatnonzero(share < ANISOTROPIC)
    ]
    return {"filters": filters}, weak


CALIBRATORS: Mapping[str, Calibrator] = {
    "a2ats": Calibrator(("queries", "keys"), a2ats_index),
    "amc": Calibrator(("keys", "values"), amc_axes),
    "kvtc": Calibrator(("keys", "values"), kvtc_axes),
    "palu": Calibrator(("keys", "values"), palu_axes),
    "qfilters": Calibrator(("queries",), _qfilters),
    "spectral": Calibrator(("keys", "values"), spectral_axes),
    "vecinfer": Calibrator(("keys", "values"), vecinfer_codebooks),
}


def fit_artifact(
    model: Any,
    sequences: Sequence[Sequence[int]],
    method: str,
    *,
    limit: int = 3000,
    seed: int = 42,
    progress: Progress | None = None,
) -> tuple[CalibrationArtifact, list[str]]:
    """The artifact of ``method`` for ``model``, fitted on ``limit`` tokens of ``sequences``; and what is worth knowing.

    Kept in float32. Raises ``QuantizerConfigError`` for a method without an artifact
    and for a model that hides its queries.
    """
    if method not in CALIBRATORS:
        refuse("method", method, f"one of {', '.join(CALIBRATORS)}", "Other methods need no artifact.")
    calibrator = CALIBRATORS[method]
    samples = collect(model, sequences, calibrator.wants, limit=limit, seed=seed, progress=progress)
    layers: dict[int, dict[str, mx.array]] = {}
    remarks: list[str] = []
    infos = {slot.index: slot.layer for slot in hooked_slots(model)}
    for index, sample in samples.items():
        info = infos[index]
        assert info is not None, "hooked slots have a layer"
        arrays, told = calibrator.fit(sample, info)
        layers[index] = {name: mx.array(array.astype(np.float32)) for name, array in arrays.items()}
        remarks += told
    used = len(next(iter(samples.values())).positions)
    about = {"sequences": len(sequences), "tokens": sum(map(len, sequences)), "sampled": used, "seed": seed}
    return CalibrationArtifact(method, layers, ModelPrint.of(model), about), remarks
