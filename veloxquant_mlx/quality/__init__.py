"""What compression costs in quality and saves in memory, measured on the model itself."""

from .measure import Measurement, Reference, Run, compare, measure, reference, relative_speed, store_as, teacher_force

__all__ = [
    "Measurement",
    "Reference",
    "Run",
    "compare",
    "measure",
    "reference",
    "relative_speed",
    "store_as",
    "teacher_force",
]
