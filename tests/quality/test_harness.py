"""mlx_lm's evaluator with compressed caches: its own code runs, on lm-eval or on what it takes of lm-eval."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import generate
from mlx_lm.models.cache import KVCache, make_prompt_cache

from tests.models import tiny
from tests.quality.letters import letters
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.core.exceptions import QuantizerConfigError

INSTALLED = importlib.util.find_spec("lm_eval") is not None
HARNESS = "veloxquant_mlx.quality.harness"
KIVI = KVCacheConfig(method="kivi", bit_width_inlier=2, residual_length=0, kivi_group_size=16)
SNAPKV = KVCacheConfig(method="snapkv", snap_budget=40, snap_obs_window=16)
TEXT = "The ferry to Skarra leaves the mainland once a day, at half past six in the morning. "


def stand_ins() -> dict[str, ModuleType]:
    """The names of lm-eval that mlx_lm's evaluator and ours import."""

    class LM:
        def __init__(self) -> None:
            pass

    contents: dict[str, dict[str, Any]] = {
        "lm_eval": {"simple_evaluate": None},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": LM},
        "lm_eval.api.registry": {"register_model": lambda name: lambda cls: cls},
        "lm_eval.tasks": {"TaskManager": None},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name], __path__=[])
    return modules


@pytest.fixture(scope="module")
def harness():
    """Our module; where lm-eval is missing, everything that was imported over the stand-ins is forgotten again."""
    if INSTALLED:
        yield importlib.import_module(HARNESS)
        return
    names = stand_ins()
    sys.modules.update(names)
    try:
        yield importlib.import_module(HARNESS)
    finally:
        for name in (*names, "mlx_lm.evaluate", HARNESS):
            sys.modules.pop(name, None)


@pytest.fixture
def evaluator(harness, monkeypatch):
    """Makes evaluators over one tiny model in place of a folder."""
    model, tokenizer, made = tiny.build("llama"), letters(), []
    monkeypatch.setattr("mlx_lm.evaluate.load", lambda *_, **__: (model, tokenizer))

    def make(config: KVCacheConfig | list[KVCacheConfig] | None, cls: Any = None, **settings: Any) -> Any:
        while made:
            made.pop().close()
        if cls is not None:
            return cls("x", **settings)
        made.append(harness.CompressedLM("x", config, **settings))
        return made[-1]

    return make


def asked(*pairs: Any) -> list[Any]:
    return [SimpleNamespace(args=pair) for pair in pairs]


QUESTIONS = asked((TEXT * 2, "It is late."), (TEXT * 2, "Z"), (TEXT, "It is late."), (TEXT * 3, "a"))


def numbers(found: Any) -> np.ndarray:
    return np.array([value for value, _ in found])


def test_without_a_method_the_scores_are_those_of_mlx_lm(harness, evaluator) -> None:
    """The last token of a prompt goes alone and texts go in pieces: float32 sums in another order."""
    plain = evaluator(None, harness.MLXLM)
    expected = plain.loglikelihood(QUESTIONS)
    texts = asked((TEXT * 5,), (TEXT,))
    rolling = plain.loglikelihood_rolling(texts)
    ours = evaluator(None, piece=64)
    found = ours.loglikelihood(QUESTIONS)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    np.testing.assert_allclose(numbers(found), numbers(expected), rtol=1e-4)
    np.testing.assert_allclose(ours.loglikelihood_rolling(texts), rolling, rtol=1e-4)


def test_the_model_makes_compressed_caches_until_the_evaluator_is_closed(evaluator) -> None:
    lm = evaluator(KIVI)
    assert all(isinstance(c, CompressedKVCache) for c in make_prompt_cache(lm._model))
    lm.close()
    assert all(type(c) is KVCache for c in make_prompt_cache(lm._model))


def test_every_answer_reads_the_compressed_prompt_its_first_token_too(harness, evaluator) -> None:
    """mlx_lm feeds the whole prompt in one call, in which tokens see each other uncompressed."""
    exact, first = numbers(evaluator(None).loglikelihood(QUESTIONS)), [1, 3]  # answers of one token
    ours = numbers(evaluator(KIVI).loglikelihood(QUESTIONS))
    assert all(abs(ours - exact) > 1e-4)
    lm = evaluator(KIVI)
    theirs = numbers(harness.MLXLM.loglikelihood(SwitchedOff(lm, harness.MLXLM), QUESTIONS))
    np.testing.assert_allclose(theirs[first], exact[first], rtol=1e-4)


class SwitchedOff:
    """An evaluator's attributes with the methods of ``cls`` in place of its own."""

    def __init__(self, lm: Any, cls: type) -> None:
        self._lm, self._cls = lm, cls

    def __getattr__(self, name: str) -> Any:
        method = vars(self._cls).get(name)
        return method.__get__(self) if callable(method) else getattr(self._lm, name)


def test_an_answer_has_the_log_probability_of_its_tokens_one_by_one(evaluator) -> None:
    """Against a loop of single tokens, with a method that acts once, at the end of the prompt."""
    lm, tokenizer = evaluator(SNAPKV), letters()
    prompt, answer = TEXT[:80], "soon."
    ((found, _),) = lm.loglikelihood(asked((prompt, answer)))
    caches = KVCacheBuilder.for_model(lm._model, SNAPKV)
    ids, expected = tokenizer.encode(prompt), tokenizer.encode(answer)
    lm._model(mx.array(ids[:-1])[None], cache=caches)
    total = 0.0
    for token, target in zip([ids[-1], *expected[:-1]], expected, strict=True):
        row = np.array(lm._model(mx.array([[token]]), cache=caches)[0, -1])
        total += float(row[target] - np.log(np.exp(row - row.max()).sum()) - row.max())
    assert found == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize(
    "config",
    [KIVI, SNAPKV],
    ids=lambda config: config.method,
)
def test_texts_are_compressed_piece_by_piece_and_alone(evaluator, config: KVCacheConfig) -> None:
    texts = asked((TEXT * 3,), (TEXT,), (TEXT * 2,))
    exact = np.array(evaluator(None, piece=64).loglikelihood_rolling(texts))
    lm = evaluator(config, piece=64)
    together = np.array(lm.loglikelihood_rolling(texts))
    alone = [lm.loglikelihood_rolling([text])[0] for text in texts]
    np.testing.assert_array_equal(together, alone)
    assert all(abs(together - exact) > 1e-4)
    whole = np.array(evaluator(config, piece=4096).loglikelihood_rolling(texts))
    np.testing.assert_allclose(whole, exact, rtol=1e-4)  # one call: nothing that was compressed is read


def test_pieces_cover_a_text_and_are_ended_by_a_token(evaluator) -> None:
    lm = evaluator(None, piece=4)
    assert [*lm._pieces(11)] == [(0, 4), (4, 5), (5, 9), (9, 10), (10, 11)]
    assert [*lm._pieces(4)] == [(0, 4)] and [*lm._pieces(5)] == [(0, 4), (4, 5)]


def test_generation_is_that_of_compressed_caches(evaluator) -> None:
    lm, tokenizer = evaluator([SNAPKV, KIVI], max_tokens=12, use_chat_template=False), letters()
    ends = {"until": ["\n\n"], "do_sample": False}
    found = lm.generate_until(asked((TEXT, ends), (TEXT[10:60], ends)))
    for prompt, said in zip((TEXT, TEXT[10:60]), found, strict=True):
        caches = KVCacheBuilder.for_model(lm._model, [SNAPKV, KIVI])
        alone = generate(lm._model, tokenizer, tokenizer.encode(prompt), max_tokens=12, prompt_cache=caches)
        assert said == alone.split("\n\n")[0]


def test_a_piece_has_a_token(evaluator) -> None:
    with pytest.raises(QuantizerConfigError, match="piece=0"):
        evaluator(None, piece=0)


# -- with lm-eval itself -----------------------------------------------------------------------------------------------

needs_lm_eval = pytest.mark.skipif(not INSTALLED, reason="lm-eval is not installed (extra eval)")
TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: 0
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
"""


@needs_lm_eval
def test_a_task_of_lm_eval_runs_with_compressed_caches(harness, evaluator, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data.json"
    rows = [{"text": TEXT * n, "choices": [" It is late.", " No."]} for n in (1, 2, 3)]
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    settings = {"include_path": str(tmp_path), "use_chat_template": False}
    evaluator(None)
    for config in (None, KIVI):
        found = harness.evaluate("x", config, ["tiny_choice"], **settings)
        assert 0.0 <= found["tiny_choice"]["acc,none"] <= 1.0
    with pytest.raises(QuantizerConfigError, match="'tiny_choise'"):
        harness.evaluate("x", KIVI, ["tiny_choise"], **settings)
