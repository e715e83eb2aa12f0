"""What compression costs in quality and saves in memory, measured on the model itself."""

from .compare import compare
from .measure import Measurement, Reference, Run, measure, reference, relative_speed, store_as, teacher_force
from .plans import Plan, plans
from .results import Comparison, Needles, Row

__all__ = [
    "Comparison",
    "Measurement",
    "Needles",
    "Plan",
    "Reference",
    "Row",
    "Run",
    "compare",
    "measure",
    "plans",
    "reference",
    "relative_speed",
    "store_as",
    "teacher_force",
]
