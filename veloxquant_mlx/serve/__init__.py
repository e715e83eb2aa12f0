"""mlx_lm's OpenAI-compatible server with compressed caches."""

from .options import ServeOptions
from .server import Server

__all__ = ["ServeOptions", "Server"]
