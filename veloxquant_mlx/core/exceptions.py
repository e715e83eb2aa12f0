"""The error family. Every message says what was given, what is valid and what to do."""


class VeloxError(Exception):
    """Base of every error that this package raises on purpose."""


class QuantizerConfigError(VeloxError, ValueError):
    """A configuration value cannot be used: names the field, the value, the valid range and the remedy."""


class KernelUnavailableError(QuantizerConfigError, RuntimeError):
    """A kernel was demanded that does not exist here; the message says how to run without it."""


class ArtifactNotFoundError(VeloxError, FileNotFoundError):
    """An artifact store does not hold what was asked for."""


class ArtifactDamagedError(VeloxError, ValueError):
    """An artifact is there but cannot be read; the message names the file."""


class CacheStateError(VeloxError, RuntimeError):
    """A cache was asked for something that its present state does not allow; the state is unchanged."""


class CacheInputError(VeloxError, ValueError):
    """Tensors handed to a cache have the wrong rank, shape or contents; the cache is unchanged."""
