"""Two real models: nothing changes while nothing is compressed, and what is compressed stays close.

Bands come from one measurement on the CPU back end (float32 model, K/V held in float16), named beside each.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import generate
from mlx_lm.models.cache import RotatingKVCache

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.report import cache_report
from veloxquant_mlx.cli.demo import passage
from veloxquant_mlx.quality.measure import compare, reference, store_as, teacher_force

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("real")]  # models are loaded by one process

PROMPT, SCORED, STEP = 256, 16, 100
QUESTION = "What is the capital of France? Answer in one sentence."

# Settings, and the mean KL in nats that was measured for SmolLM2 and for Gemma; twice that is allowed.
METHODS: dict[str, tuple[dict[str, Any], float, float]] = {
    "kivi": ({"method": "kivi", "bit_width_inlier": 4, "residual_length": 32}, 0.0036, 0.00093),
    "turboquant_rvq": ({"method": "turboquant_rvq", "bit_width_inlier": 2}, 0.021, 0.038),
    "snapkv": ({"method": "snapkv", "snap_budget": 128}, 0.016, 0.0027),
    "streaming_llm": ({"method": "streaming_llm", "stream_window_size": 124}, 0.034, 0.0077),
}
UNCHANGED: list[dict[str, Any]] = [
    {"method": "kivi", "residual_length": 1024},
    {"method": "snapkv", "snap_budget": 1024},
]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def reading(request: pytest.FixtureRequest) -> tuple[str, Any, list[int], Any]:
    """Name, model, tokens of the text, and the pass with the model's own cache."""
    model, tokenizer = request.getfixturevalue(request.param)
    tokens = list(tokenizer.encode(passage()))[: PROMPT + SCORED]
    return request.param, model, tokens, reference(model, tokens, PROMPT, step=STEP)


@pytest.mark.parametrize("label", METHODS)
def test_close_to_uncompressed(label: str, reading: tuple[str, Any, list[int], Any]) -> None:
    name, model, tokens, truth = reading
    fields, *bands = METHODS[label]
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(**fields), serve_standalone=True)
    store_as(caches, mx.float16)
    found = compare(truth, teacher_force(model, tokens, caches, PROMPT, step=STEP))
    assert found.mean_kl < 2 * bands[0 if name == "smollm2" else 1]
    assert cache_report(caches).ratio > 1


@pytest.mark.parametrize("fields", UNCHANGED, ids=lambda f: f["method"])
def test_identity(fields: dict[str, Any], reading: tuple[str, Any, list[int], Any]) -> None:
    """Prompt in chunks, its last token alone, then single tokens: bit-identical while nothing is compressed."""
    _, model, tokens, truth = reading
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(**fields), serve_standalone=True)
    run = teacher_force(model, tokens, caches, PROMPT, step=STEP)
    np.testing.assert_array_equal(run.logprobs, truth.run.logprobs)


@pytest.mark.parametrize("label", METHODS)
def test_sensible_text(label: str, smollm2: tuple[Any, Any]) -> None:
    """An easy question is answered, also where the prompt is packed at once (rvq) or on the way (kivi)."""
    model, tokenizer = smollm2
    fields, *_ = METHODS[label]
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(**fields), serve_standalone=True)
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=12, prompt_cache=caches)


def test_gemma_compresses_its_full_layers_only(gemma3: tuple[Any, Any]) -> None:
    """3 of 18; the receipt says why the other 15 are left to the model."""
    caches = KVCacheBuilder.for_model(gemma3[0], KVCacheConfig(method="turboquant_rvq"))
    full = [i for i, c in enumerate(caches) if isinstance(c, CompressedKVCache)]
    assert full == [5, 11, 17]
    assert all(type(c) is RotatingKVCache for i, c in enumerate(caches) if i not in full)
    mx.eval(gemma3[0](mx.arange(2, 12)[None], cache=caches), [c.state for c in caches])
    report = cache_report(caches)
    kept = [layer for layer in report.layers if layer.method == "-"]
    assert len(kept) == 15 and all("sliding window" in layer.attention[0] for layer in kept)
    assert "sliding window: bounded by the model's own cache" in str(report)
    assert all(layer.packed for i, layer in enumerate(report.layers) if i in full)
