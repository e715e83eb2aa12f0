"""Settings of the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ServeOptions:
    """What to serve and how. The names are mlx_lm's: its classes read this object as their command line.

    ``prompt_cache_size`` and ``prompt_cache_bytes`` bound the conversations kept for reuse, by number and by bytes;
    ``decode_concurrency`` and ``prompt_concurrency`` the requests that are computed together. ``max_tokens``, ``temp``,
    ``top_p``, ``top_k`` and ``min_p`` are defaults for requests that name none. A page of another origin may read
    answers only if its origin is in ``allowed_origins`` (``"*"``: any).
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8080
    allowed_origins: list[str] = field(default_factory=list)
    adapter_path: str | None = None
    draft_model: str | None = None
    num_draft_tokens: int = 3
    trust_remote_code: bool = False
    chat_template: str = ""
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    use_default_chat_template: bool = False
    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 512
    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    prefill_step_size: int = 2048
    prompt_cache_size: int = 10
    prompt_cache_bytes: int | None = None
    pipeline: bool = False
    # mlx_lm's own quantised cache, which this server replaces.
    kv_bits: None = field(default=None, init=False)
    kv_group_size: int = field(default=64, init=False)
    quantized_kv_start: int = field(default=0, init=False)
