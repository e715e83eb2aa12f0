"""Fixtures that every test may use: two real models, converted once into ``.models/``."""

import signal
from pathlib import Path
from typing import Any

import pytest

from veloxquant_mlx.models.gguf import ensure_model

MODELS = Path(__file__).resolve().parent.parent / ".models"

# Shells make what they start in the background deaf to Ctrl-C, and a server started by a test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def load(name: str) -> tuple[Any, Any]:
    """Model and tokenizer; a missing package is an error that says what to install."""
    from mlx_lm import load as mlx_lm_load

    model, tokenizer, *_ = mlx_lm_load(str(ensure_model(name, MODELS)))
    return model, tokenizer


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct: llama, 30 layers, head size 64, 9 query and 3 key/value heads."""
    return load("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> tuple[Any, Any]:
    """Gemma 3 270M: 18 layers, 15 of them sliding (window 512), head size 256, 4 query heads, 1 key/value head."""
    return load("gemma3")
