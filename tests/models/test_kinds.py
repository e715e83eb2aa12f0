"""Every kind of model with every method: it runs and the receipt says how, or it is refused with a reason.

The table of model kinds in docs/coverage.md is made from the parameters of these tests. That nothing is silently wrong
(bit-identity below the budgets, closeness at 8 bits) is tested for all these models in test_generate.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.matrix import Row
from tests.models import tiny
from tests.models.running import FIRST, MECHANISMS, caches_of, greedy, lively
from veloxquant_mlx import QuantizerConfigError
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.report import cache_report

PROMPT = 150  # every row of the matrix has compressed something by then
SLIDING = "sliding window"
RECURRENT = "recurrent state"
CHUNKED = "chunked attention"
BY_HAND = "decoded arrays"


@dataclass(frozen=True)
class Kind:
    """A tiny model and what is true of it: ``layers`` counts the entries of its cache list by what holds them."""

    title: str
    model: str
    layers: dict[str, int]
    by_hand: bool = False  # attention code of its own: no queries reach a cache
    moves: bool = True  # a plain rotary module, so that keys can be moved to other positions
    stream: bool = True  # one hidden state, to which attention adds a branch
    native: str = ""  # why nothing is compressed
    batch: str = "yes"  # whether mlx_lm's batches serve it (test_batching.py)

    def refusal(self, row: Row) -> str:
        """Why ``for_model`` refuses the method here; "" where it does not."""
        if self.by_hand and row.queries:
            return "needs queries"
        if not self.stream and row.method in WATCHES_STREAM:
            return "needs the residual stream"
        return "" if self.moves or row.method not in MOVES_KEYS else "moves keys"

    def cell(self, row: Row) -> str:
        if self.native:
            return f"own cache: {self.native}"
        return f"no: {self.refusal(row)}" if self.refusal(row) else "yes"


MOVES_KEYS = ("streaming_llm",)
WATCHES_STREAM = ("squeeze",)
OURS = "compressed"
NOT_MLX_LM = "mlx_lm batches none"
KINDS = (
    Kind("llama", "llama", {OURS: 2}),
    Kind("llama, YaRN positions", "llama_yarn", {OURS: 2}),
    Kind("llama, dynamic positions", "llama_dynamic", {OURS: 2}, moves=False, batch=f"no: {NOT_MLX_LM}"),
    Kind("qwen2 (biases)", "qwen2", {OURS: 2}),
    Kind("qwen3 (norms on queries and keys)", "qwen3", {OURS: 2}),
    Kind("gemma2 (soft cap)", "gemma2", {OURS: 2}, by_hand=True, batch="no: takes no mask per sequence, one by one"),
    Kind("gemma3 (sliding layers)", "gemma3", {OURS: 2, SLIDING: 2}),
    Kind("gemma3n (shared keys and values)", "gemma3n", {OURS: 2, SLIDING: 2}, stream=False),
    Kind("gemma4 (shared keys and values)", "gemma4_text", {OURS: 2, SLIDING: 2}),
    Kind("gpt_oss (attention sinks)", "gpt_oss", {OURS: 1, SLIDING: 1}),
    Kind("phi3 (fused projections, partial rotation)", "phi3", {OURS: 2}),
    Kind("cohere2 (layers without positions)", "cohere2", {OURS: 2, SLIDING: 2}),
    Kind("deepseek_v2 (keys and values of different sizes)", "deepseek_v2", {OURS: 2}),
    Kind("deepseek_v3 (latent attention)", "deepseek_v3", {"latent attention": 2}, native="latent attention"),
    Kind("qwen3_next (recurrent layers)", "qwen3_next", {OURS: 2, RECURRENT: 2}),
    Kind("jamba (recurrent layers)", "jamba", {OURS: 1, RECURRENT: 1}, batch="as mlx_lm: pads reach the state"),
    Kind(
        "falcon_h1 (two caches in one layer)",
        "falcon_h1",
        {"several caches in one slot": 2},
        native="several caches in one slot",
    ),
    Kind(
        "llama4 (chunked attention)",
        "llama4",
        {OURS: 1, CHUNKED: 3},
        batch=f"no: {NOT_MLX_LM}",
    ),
    Kind("mistral3 (wrapper of another model)", "mistral3", {OURS: 2}),
    Kind("stablelm (attention that casts)", "stablelm", {OURS: 2}, by_hand=True),
)
# Every method meets these; the other kinds differ in what the mechanisms see.
CORE = ("llama", "qwen2", "qwen3", "gemma3", "gpt_oss", "deepseek_v2")
CASES = [
    pytest.param(
        kind,
        row,
        id=f"{kind.model}-{row.method}",
        marks=pytest.mark.covers("kinds", kind=kind.title, cell=kind.cell(row)),
    )
    for kind in KINDS
    for row in (FIRST if kind.model in CORE else MECHANISMS).values()
]


@pytest.mark.parametrize(("kind", "row"), CASES)
def test_kind(kind: Kind, row: Row) -> None:
    model = tiny.build(kind.model)
    stock = make_prompt_cache(model)
    if kind.refusal(row):
        with pytest.raises(QuantizerConfigError, match=kind.refusal(row).replace(" ", ".*")):
            caches_of(model, row)
        return
    if kind.native:
        with pytest.warns(UserWarning, match="no layer of this model can be compressed"):
            caches = caches_of(model, row)
    else:
        caches = caches_of(model, row)

    ids = tiny.tokens(PROMPT)
    tokens, logprobs = greedy(model, ids[0], 8, prompt_cache=caches, prefill_step_size=32, sampler=lively)
    own, expected = greedy(model, ids[0], 8, prompt_cache=stock, prefill_step_size=32, sampler=lively)
    assert np.isfinite(logprobs).all()
    if kind.native:
        assert tokens == own and np.array_equal(logprobs, expected)

    report = cache_report(caches)
    assert [layer.tokens for layer in report.layers if layer.method != "-"] == [PROMPT + 8] * kind.layers.get(OURS, 0)
    seen = Counter(OURS if layer.method == row.method else layer.attention[0].split(":")[0] for layer in report.layers)
    assert {name: sum(n for why, n in seen.items() if name in why) for name in kind.layers} == kind.layers
    assert sum(seen.values()) == len(stock) and all(why in str(report) for why in seen if why != OURS)
    for ours, theirs, layer in zip(caches, stock, report.layers, strict=True):
        if not isinstance(ours, CompressedKVCache):
            assert type(ours) is type(theirs) and ours.nbytes == theirs.nbytes == layer.nbytes
        elif row.drops:
            assert layer.rows < layer.tokens
        else:
            assert layer.packed or row.indexes
        if isinstance(ours, CompressedKVCache):
            assert (BY_HAND in " ".join(layer.attention)) == kind.by_hand
            assert layer.nbytes < 0.8 * theirs.nbytes or row.indexes
