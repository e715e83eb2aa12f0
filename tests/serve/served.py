"""A tiny model with random weights in a folder that mlx_lm can open, and what it answers without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import load, stream_generate
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import tiny
from tests.models.running import FIRST, config
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.serve import Server

# w1 is the user, w2 the assistant, w3 the system; w4 ends what they say.
TEMPLATE = (
    "{% set marks = {'user': 'w1', 'assistant': 'w2', 'system': 'w3'} %}{% for m in messages %}"
    "{% if m['role'] not in marks %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ marks[m['role']] }} {{ m['content'] }} w4 {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
)
CONFIGS = {method: config(row) for method, row in FIRST.items()}  # every method that the matrix holds
KIVI = KVCacheConfig(method="kivi", bit_width_inlier=4, kivi_group_size=32, residual_length=32)


def make_folder(folder: Path, architecture: str = "qwen3", seed: int = 0) -> Path:
    """Weights, configuration and a tokenizer whose token 7 is "w7"; the last one ends a text."""
    folder.mkdir(parents=True, exist_ok=True)
    module, arguments = tiny.CONFIGS[architecture]
    model = tiny.build(architecture, seed)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps({"model_type": module, **arguments}))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{tiny.VOCAB - 1}")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    return folder


def text(count: int, seed: int) -> str:
    """``count`` random words."""
    return " ".join(f"w{i}" for i in np.random.default_rng(seed).integers(0, tiny.VOCAB, count))


class Alone:
    """The same model without a server: one sequence, one cache, mlx_lm's own loop."""

    def __init__(self, folder: Path, config: KVCacheConfig | None):
        self.model, self.tokenizer, *_ = load(str(folder))
        self.config = config

    def complete(self, prompt: str, max_tokens: int) -> str:
        """The greedy continuation of ``prompt``."""
        ids = self.tokenizer.encode(prompt)
        caches = None
        if self.config is not None:
            caches = KVCacheBuilder.for_model(self.model, self.config, serve_standalone=True)
        steps = stream_generate(self.model, self.tokenizer, ids, max_tokens=max_tokens, prompt_cache=caches)
        return "".join(step.text for step in steps)

    def chat(self, messages: list[dict[str, str]], max_tokens: int) -> str:
        ids: Any = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.complete(ids, max_tokens)


def figures(server: Server) -> dict[str, float]:
    """What /metrics says, without the common prefix of the names."""
    return figures_at(server.url)


def figures_at(url: str) -> dict[str, float]:
    with urlopen(url + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("veloxquant_"): float(value) for name, value in pairs}
