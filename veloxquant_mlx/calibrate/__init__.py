"""What can be measured on a model and a text before compressing: bits per layer, and artifacts for methods."""

from .allocate import CHOICES, LLOYD_MAX, MIN_MAX, allocate_bits, expected
from .collect import Call, Sample, collect, sequences_of
from .fit import CALIBRATORS, fit_artifact
from .qfilters import query_filters
from .sensitivity import Sensitivity, divergences, layer_sensitivity
from .widths import bit_fields, for_layers, valid_bits

__all__ = [
    "CALIBRATORS",
    "CHOICES",
    "LLOYD_MAX",
    "MIN_MAX",
    "Call",
    "Sample",
    "Sensitivity",
    "allocate_bits",
    "bit_fields",
    "collect",
    "divergences",
    "expected",
    "fit_artifact",
    "for_layers",
    "layer_sensitivity",
    "query_filters",
    "sequences_of",
    "valid_bits",
]
