"""Vision-language models of mlx-vlm (extra ``vlm``): the language model's caches, fed with pictures too."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from tests.matrix import Row
from tests.models.running import FIRST, caches_of, config
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, QuantizerConfigError, attach
from veloxquant_mlx.cache.batch import CompressedBatchCache
from veloxquant_mlx.cache.layer import CompressedKVCache, Mode

pytest.importorskip("mlx_vlm", reason="the extra vlm is not installed")
from mlx_vlm.generate.ar import _make_cache, generate_step  # type: ignore[reportMissingImports]
from mlx_vlm.models.cache import make_prompt_cache  # type: ignore[reportMissingImports]

TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
}
IMAGE = 120  # the token that a picture's features replace
PATCHES = 16  # 4 x 4 patches become 2 x 2 tokens
QWEN2_VL = {
    **TEXT,
    "model_type": "qwen2_vl",
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "image_token_id": IMAGE,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_config": {"model_type": "qwen2_vl", "depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
}
GEMMA3 = {
    "model_type": "gemma3",
    "vocab_size": 128,
    "hidden_size": 64,
    "text_config": {
        **TEXT,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "mm_tokens_per_image": 4,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "patch_size": 14,
        "image_size": 56,
    },
}
KIVI_8 = KVCacheConfig(method="kivi", bit_width_inlier=8, residual_length=32)
MOVES_KEYS = ("streaming_llm",)  # not the keys of qwen2_vl, whose positions have three parts
SOME = [row for row in FIRST.values() if row.method not in MOVES_KEYS]
NAMES = [row.method for row in SOME]


def build(arguments: dict[str, Any]) -> Any:
    library = importlib.import_module(f"mlx_vlm.models.{arguments['model_type']}")
    mx.random.seed(0)
    settings = library.ModelConfig.from_dict(dict(arguments))
    for name, kind in (("text_config", library.TextConfig), ("vision_config", library.VisionConfig)):
        if isinstance(getattr(settings, name), dict):
            setattr(settings, name, kind.from_dict(getattr(settings, name)))
    model = library.Model(settings)
    model.update(tree_map(lambda a: a + 0.1 * mx.random.normal(a.shape) if a.ndim == 1 else a, model.parameters()))
    return model


@pytest.fixture(scope="module")
def qwen() -> Any:
    return build(QWEN2_VL)


def picture(seed: int) -> dict[str, Any]:
    """A prompt of 150 tokens, 4 of them a picture, as mlx_vlm's generate_step takes it."""
    ids = np.random.default_rng(seed).integers(0, 119, 150)
    ids[20:25] = [122, *[IMAGE] * 4]
    return {
        "input_ids": mx.array(ids[None]),
        "pixel_values": mx.random.normal((PATCHES, 3 * 2 * 14 * 14), key=mx.random.key(seed)),
        "mask": None,
        "image_grid_thw": mx.array([[1, 4, 4]]),
    }


def answer(model: Any, prompt: dict[str, Any], caches: list[Any] | None, n: int = 12) -> tuple[list[int], np.ndarray]:
    steps = generate_step(model=model, max_tokens=n, temperature=0.0, prompt_cache=caches, **prompt)
    rows = [(int(token), np.array(logprobs).reshape(-1)) for token, logprobs in steps]
    return [token for token, _ in rows], np.stack([row for _, row in rows])


def test_layers_of_a_language_model_are_coordinated(qwen: Any) -> None:
    """mlx_vlm calls the language model by itself, with embeddings: its layers still share one choice."""
    config = KVCacheConfig(method="chunkkv", chunkkv_budget=60, chunkkv_reuse_layers=2)
    first, second = KVCacheBuilder.for_model(qwen, config)
    answer(qwen, picture(1), [first, second], n=2)
    assert mx.array_equal(first.positions, second.positions) and first.positions.shape[-1] < 100


def test_a_picture_is_seen_through_compressed_caches(qwen: Any) -> None:
    """Below the residual nothing differs; at 8 bits hardly anything (half a step is 0.2 % of a group's range)."""
    prompt = picture(1)
    _, expected = answer(qwen, prompt, make_prompt_cache(qwen.language_model))
    wide = KVCacheConfig(method="kivi", residual_length=256)
    np.testing.assert_array_equal(answer(qwen, prompt, KVCacheBuilder.for_model(qwen, wide))[1], expected)
    caches = KVCacheBuilder.for_model(qwen, KIVI_8)
    close = answer(qwen, prompt, caches)[1]
    assert np.abs(close - expected).mean() < 0.03 * expected.std()
    assert {c.mode for c in caches} == {Mode.HANDLE} and all(c.held_bytes()["packed"] for c in caches)
    other = answer(qwen, prompt | {"pixel_values": -prompt["pixel_values"]}, KVCacheBuilder.for_model(qwen, KIVI_8))[1]
    assert np.abs(other - close).mean() > 3 * np.abs(close - expected).mean()  # the picture matters


@pytest.mark.parametrize("row", SOME, ids=NAMES)
def test_every_method(row: Row, qwen: Any) -> None:
    caches = caches_of(qwen, row)
    tokens, logprobs = answer(qwen, picture(2), caches)
    assert len(tokens) == 12 and np.isfinite(logprobs).all()
    assert {type(c) for c in caches} == {CompressedKVCache}


@pytest.mark.parametrize("row", SOME, ids=NAMES)
def test_attached_language_model(row: Row, qwen: Any) -> None:
    """mlx_vlm asks the language model for caches: attach that."""
    expected, _ = answer(qwen, picture(2), caches_of(qwen, row))
    with attach(qwen.language_model, config(row)):
        assert {type(c) for c in make_prompt_cache(qwen.language_model)} == {CompressedKVCache}
        assert answer(qwen, picture(2), None)[0] == expected


@pytest.mark.parametrize("row", SOME, ids=NAMES)
def test_left_padded_batch(row: Row, qwen: Any) -> None:
    """mlx_vlm's batches pad on the left: the rows are single runs."""
    language = qwen.language_model
    lengths, longest = (7, 150, 90), 150
    ids = [mx.array(np.random.default_rng(n).integers(0, 119, n)) for n in lengths]
    padding = [longest - n for n in lengths]
    with attach(language, config(row)):
        batch = _make_cache(language, padding)
    assert {type(c) for c in batch} == {CompressedBatchCache}
    wide = mx.stack(
        [mx.concatenate([mx.zeros(p, mx.int32), x.astype(mx.int32)]) for p, x in zip(padding, ids, strict=True)]
    )
    position = mx.maximum(mx.arange(longest)[None] - mx.array(padding)[:, None], 0)
    out = language(wide, cache=batch, position_ids=mx.stack([position] * 3)).logits
    for i, x in enumerate(ids):
        single = caches_of(qwen, row)
        alone = language(x[None], cache=single, position_ids=mx.stack([mx.arange(lengths[i])[None]] * 3)).logits
        # One chunk on empty caches: exact attention; float32 sums in another order.
        np.testing.assert_allclose(np.array(out[i, padding[i] :]), np.array(alone[0]), atol=1e-4)
        assert batch[0].rows[i].offset == lengths[i]


@pytest.mark.parametrize("method", MOVES_KEYS)
def test_keys_that_cannot_be_moved(method: Any, qwen: Any) -> None:
    with pytest.raises(QuantizerConfigError, match="moves no keys"):
        KVCacheBuilder.for_model(qwen, KVCacheConfig(method=method))


def test_sliding_layers_stay_native() -> None:
    model = build(GEMMA3)
    caches, stock = KVCacheBuilder.for_model(model, KIVI_8), make_prompt_cache(model.language_model)
    assert [type(c).__name__ for c in stock] == ["RotatingKVCache", "KVCache"] * 2
    assert [type(c) for c in caches[::2]] == [type(c) for c in stock[::2]]
    assert {type(c) for c in caches[1::2]} == {CompressedKVCache}
    ids = mx.array(np.random.default_rng(0).integers(0, 119, (1, 120)))
    a, b = (model.language_model(ids, cache=c).logits for c in (caches, stock))
    np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5)
    a, b = (model.language_model(ids[:, :1], cache=c).logits for c in (caches, stock))
    assert np.abs(np.array(a - b)).mean() < 0.03 * np.array(b).std()
