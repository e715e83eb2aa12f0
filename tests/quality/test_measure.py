"""The yardstick itself: exact where the answer is known."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

from veloxquant_mlx.core.exceptions import CacheInputError
from veloxquant_mlx.quality import Reference, Run, measure, reference, relative_speed, store_as, teacher_force
from veloxquant_mlx.quality.measure import compare

LAYERS, KV_HEADS, D, VOCAB = 2, 2, 16, 97
TOKENS = [(7 * i * i + 3) % VOCAB for i in range(60)]


@pytest.fixture(scope="module")
def model():
    mx.random.seed(1)
    args = ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=LAYERS,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=D,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
    )
    return Model(args)


def run_of(probabilities, kv_bytes=100, decode_seconds=1.0):
    return Run(np.log(np.array(probabilities, dtype=np.float32)), kv_bytes, 0, 1.0, decode_seconds)


def test_kl_ratio_and_speed_of_a_hand_made_case():
    truth = Reference(run_of([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]), bytes_16=800, caches=[])
    found = compare(truth, run_of([[0.25, 0.75], [0.1, 0.9], [0.5, 0.5]], kv_bytes=200, decode_seconds=2.0))
    kl = [0.5 * np.log(2) + 0.5 * np.log(2 / 3), 0.8 * np.log(9), 0.0]
    # 1e-6: the probabilities went through float32.
    assert found.mean_kl == pytest.approx(np.mean(kl), abs=1e-6)
    assert found.max_kl == pytest.approx(max(kl), abs=1e-6)
    assert found.ratio == 4.0
    assert found.decode_tokens_per_second == 1.0
    assert found.relative_speed is None
    # [0.5, 0.5] ties at index 0; the first candidate row prefers index 1.
    assert found.top1_agreement == pytest.approx(1 / 3)


def test_the_models_own_cache_against_itself(model):
    found = measure(model, TOKENS, lambda: make_prompt_cache(model), prompt_len=50)
    assert found.tokens == 10
    assert found.mean_kl == 0.0
    assert found.top1_agreement == 1.0
    # The same work on both sides; a tenfold difference would be a fault of the clock, not noise.
    assert found.relative_speed is not None and 0.1 < found.relative_speed < 10


def test_measuring_speed_leaves_the_caches_alone(model):
    truth = reference(model, TOKENS, 50)
    caches = make_prompt_cache(model)
    store_as(caches, mx.float16)
    teacher_force(model, TOKENS, caches, 50)
    assert relative_speed(model, 5, truth.caches, caches) > 0
    assert [c.offset for c in truth.caches + caches] == [len(TOKENS) - 1] * 2 * LAYERS


def test_chunks_do_not_change_the_predictions(model):
    whole = teacher_force(model, TOKENS, make_prompt_cache(model), 50)
    chunks = teacher_force(model, TOKENS, make_prompt_cache(model), 50, step=7)
    # float32 sums over 60 rows in another order.
    np.testing.assert_allclose(whole.logprobs, chunks.logprobs, atol=1e-4)


def test_predictions_are_those_of_one_forward_pass(model):
    run = teacher_force(model, TOKENS, make_prompt_cache(model), 50)
    logits = model(mx.array([TOKENS]))[0, 49:-1]
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    np.testing.assert_allclose(run.logprobs, expected, atol=1e-4)


def test_sixteen_bit_bytes_count_the_tokens_fed(model):
    # The last token is predicted, never fed.
    assert reference(model, TOKENS, 50).bytes_16 == 2 * 2 * LAYERS * KV_HEADS * D * (len(TOKENS) - 1)


def test_store_as_halves_a_float32_cache(model):
    plain, half = make_prompt_cache(model), make_prompt_cache(model)
    store_as(half, mx.float16)
    bytes_32 = teacher_force(model, TOKENS, plain, 50).kv_bytes
    assert teacher_force(model, TOKENS, half, 50).kv_bytes * 2 == bytes_32


def test_progress_reaches_the_end(model):
    calls = []
    teacher_force(model, TOKENS, make_prompt_cache(model), 50, step=20, progress=lambda *args: calls.append(args))
    assert calls[0] == (20, 59)
    assert calls[-1] == (59, 59)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


@pytest.mark.parametrize("prompt_len", [0, -1, 59, 60, 100])
def test_a_prompt_without_a_continuation_is_refused(model, prompt_len):
    with pytest.raises(CacheInputError, match=f"prompt_len={prompt_len} .*1..58"):
        teacher_force(model, TOKENS, make_prompt_cache(model), prompt_len)


def test_passes_over_other_tokens_are_refused():
    truth = Reference(run_of([[0.5, 0.5]] * 3), 100, [])
    with pytest.raises(CacheInputError, match="same tokens"):
        compare(truth, run_of([[0.5, 0.5]] * 2))
