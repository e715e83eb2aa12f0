"""``veloxquant serve``: the server with its log on standard error."""

from __future__ import annotations

import json
import logging
import signal
from typing import Any

from ..cache.base import ModelConfig
from ..core.exceptions import QuantizerConfigError, VeloxError
from ..serve import ServeOptions, Server
from .generate import location, unloadable

__all__ = ["ServeOptions", "run_server", "template_args"]


def template_args(text: str) -> dict[str, Any]:
    """The JSON object of ``--chat-template-args``."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise QuantizerConfigError(
            f"--chat-template-args {text!r} cannot be used: it must be a JSON object. "
            "Example: '{\"enable_thinking\": false}'"
        )
    return found


def run_server(options: ServeOptions, config: ModelConfig | None, level: str) -> None:
    """Serve until Ctrl-C or SIGTERM; one readable error for whatever keeps the server from starting."""
    name, options.model = options.model, location(options.model)
    if options.draft_model is not None:
        options.draft_model = location(options.draft_model)
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.captureWarnings(True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server = Server(options, config)
    except VeloxError:
        raise
    except Exception as error:
        raise unloadable(name, error) from error
    server.serve_forever()
