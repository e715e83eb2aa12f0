"""Coordinators: decisions that need the caches of all layers, taken before a forward pass."""
