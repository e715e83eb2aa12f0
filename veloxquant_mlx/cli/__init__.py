"""The command line ``veloxquant``. It calls the library and holds no logic of its own."""

from .main import app

__all__ = ["app"]
