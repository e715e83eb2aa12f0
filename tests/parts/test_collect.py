"""What calibration sees of a model: real queries, keys and values, the same tokens in all layers; filters of them."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests import fixture
from tests.models import tiny
from veloxquant_mlx import CacheInputError, QuantizerConfigError
from veloxquant_mlx.artifacts import CalibrationArtifact
from veloxquant_mlx.calibrate import collect, fit_artifact, query_filters, sequences_of
from veloxquant_mlx.models.inspect import cache_slots

TEXT: Any = tiny.tokens(600)[0].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "gemma4_text"])
def test_keys_and_values_are_those_of_the_models_own_cache(name):
    model = tiny.build(name)
    samples = collect(model, [TEXT[:40]], limit=40)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([TEXT[:40]]), cache=caches))
    full = [slot.index for slot in cache_slots(model) if slot.layer is not None]
    assert list(samples) == full
    for i, sample in samples.items():
        keys, values = (rows[..., :40, :] for rows in (caches[i].keys, caches[i].values))
        assert mx.array_equal(sample.parts["keys"], keys[0])
        assert mx.array_equal(sample.parts["values"], values[0])
        assert sample.kv_heads == keys.shape[1]
        assert sample.positions.tolist() == list(range(40))


def test_queries_explain_the_attention_of_the_model():
    """Attention of the last token from the sampled parts, through the output projection, against the model's own."""
    model = tiny.build("llama")
    seen = collect(model, [TEXT[:20]], limit=20)[0]
    q, k, v = (seen.parts[name] for name in ("queries", "keys", "values"))
    out = mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], scale=q.shape[-1] ** -0.5, mask="causal")
    layer = model.model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens(mx.array([TEXT[:20]])))
    want = layer.self_attn(x, mask="causal")
    got = layer.self_attn.o_proj(out.transpose(0, 2, 1, 3).reshape(1, 20, -1))
    assert mx.allclose(got, want, atol=1e-5)  # float32, sums of 64 numbers around 1


def test_a_bounded_sample_is_the_same_tokens_everywhere_and_repeats():
    model = tiny.build("llama")
    told = []
    whole = collect(model, [TEXT, TEXT[:50]], limit=10**6)
    some = collect(model, [TEXT, TEXT[:50]], limit=64, progress=lambda *a: told.append(a))
    again = collect(model, [TEXT, TEXT[:50]], limit=64)
    assert told == [(512, 650), (600, 650), (650, 650)]
    for i in some:
        assert some[i].parts["queries"].shape[1] == 64
        assert np.array_equal(some[i].positions, some[0].positions)
        assert mx.array_equal(some[i].parts["queries"], again[i].parts["queries"])
    drawn = np.sort(np.random.default_rng(42).choice(650, 64, replace=False))
    assert np.array_equal(some[0].positions, np.where(drawn < 600, drawn, drawn - 600))
    assert mx.array_equal(some[1].parts["keys"], mx.take(whole[1].parts["keys"], mx.array(drawn), axis=1))


def test_only_what_is_wanted_is_kept():
    assert set(collect(tiny.build("llama"), [TEXT[:8]], ["values"])[0].parts) == {"values"}


def test_refusals():
    model = tiny.build("llama")
    with pytest.raises(CacheInputError, match="no tokens"):
        collect(model, [])
    with pytest.raises(QuantizerConfigError, match="no full-attention layer"):
        collect(tiny.build("mamba2"), [TEXT])
    with pytest.raises(QuantizerConfigError, match="method='kivi'.*qfilters"):
        fit_artifact(model, [TEXT], "kivi")


def test_a_model_that_raises_is_left_as_it_was(monkeypatch):
    model = tiny.build("llama")
    before = dict(vars(model))
    with pytest.raises(ValueError, match="stop"):
        collect(model, [TEXT], progress=lambda *a: (_ for _ in ()).throw(ValueError("stop")))
    assert vars(model) == before


def test_sequences_start_as_the_tokenizer_starts():
    tokenizer = SimpleNamespace(encode=lambda text: [1, *map(ord, text)], bos_token_id=1)
    assert sequences_of(tokenizer, "abcdefg", length=4) == [[1, 97, 98, 99], [1, 100, 101, 102]]
    assert sequences_of(tokenizer, "ab", length=4) == [[1, 97, 98]]
    assert len(sequences_of(tokenizer, "a" * 100, length=4, most=5)) == 5
    plain = SimpleNamespace(encode=lambda text: list(map(ord, text)), bos_token_id=None)
    assert sequences_of(plain, "abcd", length=2) == [[97, 98], [99, 100]]


FILTERS = [
    [0.035855, -0.135909, 0.267108, 0.241471, 0.226207, -0.271727, -0.002064, -0.194690],
    [-0.029843, -0.450072, 0.391946, 0.459160, 0.034759, -0.037401, -0.057437, 0.208410],
]


def test_filters_of_the_fixture():
    filters, share = query_filters(fixture.Q, fixture.HEADS)
    assert np.allclose(filters, FILTERS, atol=5e-7)  # printed with six digits
    assert (share > 0.5).all()


def test_filters_point_to_where_queries_lie():
    """Queries around a direction per head, one head on the other side of the axis that the solver may return."""
    rng = np.random.default_rng(0)
    means = rng.standard_normal((4, 16))
    queries = 10 * means[:, None] + rng.standard_normal((4, 500, 16))
    filters, share = query_filters(queries, 2)
    unit = means / np.linalg.norm(means, axis=1, keepdims=True)
    assert np.allclose(filters, unit.reshape(2, 2, 16).mean(1), atol=0.05)  # noise 1 / (10 |m| sqrt(500))
    assert (share > 0.99).all()
    again, _ = query_filters(-queries, 2)
    assert np.allclose(again, -filters, atol=1e-12)


def test_an_artifact_of_filters(tmp_path):
    model = tiny.build("llama")
    artifact, remarks = fit_artifact(model, [TEXT], "qfilters", limit=300)
    artifact.save(tmp_path / "f.safetensors")
    loaded = CalibrationArtifact.load(tmp_path / "f.safetensors")
    loaded.check_model(model)
    assert loaded.about == {"sequences": 1, "tokens": 600, "sampled": 300, "seed": 42}
    samples = collect(model, [TEXT], limit=300)
    weak = 0
    for i, sample in samples.items():
        want, share = query_filters(sample.numpy("queries"), 2)
        assert np.array_equal(np.array(loaded.layer(i)["filters"]), want.astype(np.float32))
        weak += (share < 0.6).sum()
    assert len(remarks) == weak > 0  # random weights: heads without a direction
    assert all("query head" in line for line in remarks)
