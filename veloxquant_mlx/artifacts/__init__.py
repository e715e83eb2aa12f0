"""Where rotations, codebooks, projection matrices and what a calibration found are kept."""

from .calibration import CalibrationArtifact, ModelPrint, calibrated
from .stores import InMemoryArtifactStore, NpyArtifactStore

__all__ = ["CalibrationArtifact", "InMemoryArtifactStore", "ModelPrint", "NpyArtifactStore", "calibrated"]
