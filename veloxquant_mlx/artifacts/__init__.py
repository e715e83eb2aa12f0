"""Stores for rotations, codebooks and projection matrices."""

from .stores import InMemoryArtifactStore, NpyArtifactStore

__all__ = ["InMemoryArtifactStore", "NpyArtifactStore"]
