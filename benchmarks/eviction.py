"""What dropping tokens costs: every method that drops, at a half and a quarter of a 1,500-token prompt, on real models.

Two measurements against the model's own cache. KL: a prompt of the committed text, then each following token
teacher-forced. Needle: a sentence with a number stands at several depths of the text, the end of the prompt repeats
its beginning, and the log-probability of the number is taken (and whether every digit is the model's first choice).
``--keys`` adds, for methods that score with the model's queries, the same method fed keys in their place: what packages
without the real queries do. It exists in this benchmark only.

Keys and values are float32, so that no rounding hides in the numbers. Gemma's sliding layers keep their own caches.
"""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from typing import Any, get_args

import mlx.core as mx
import numpy as np

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.registry import MethodName, method
from veloxquant_mlx.cache.report import cache_report
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.quality.measure import Reference, compare, reference, teacher_force

from . import common

NEEDLE, QUESTION = " The secret number of the harbour is", " 48173."
DEPTHS = (0.1, 0.4, 0.7)
# rocketkv is set by the ratio of what a step reads, streaming_llm by its window.
RATIO, WINDOW = "rocketkv_compression_ratio", "stream_window_size"


def fields(name: MethodName, budget: int, prompt: int) -> dict[str, Any]:
    """Settings of ``name`` that keep ``budget`` of ``prompt`` tokens; the rest as the API has it."""
    if name == "rocketkv":
        return {RATIO: prompt / budget}
    if name == "streaming_llm":
        return {WINDOW: budget - 4}
    own: Any = method(name).info.options
    names = [f.name for f in dataclasses.fields(own)]
    quiet = {"qfilters_on_low_retention": "ignore"} if name == "qfilters" else {}
    return {n: budget for n in names if n.endswith("_budget") and not n.endswith("resolved_budget")} | quiet


def dropping() -> list[MethodName]:
    layer, found = LayerInfo(kv_heads=2), []
    for name in get_args(MethodName):
        entry = method(name)
        policy = entry.recipe(KVCacheConfig(method=name), layer).eviction
        if policy is not None and policy.drops:
            found.append(name)
    return found


def feed_keys(caches: list[Any]) -> None:
    """Give the scores of every compressed cache the keys of the step where its queries belong."""
    for cache in caches:
        if isinstance(cache, CompressedKVCache):
            life, store, attended = cache._life, cache._store, cache._life.attended

            def instead(
                queries: mx.array, scale: float, sinks: Any, store: Any = store, attended: Any = attended
            ) -> None:
                keys = store.keys.dense(store.n - queries.shape[2], store.n)
                attended(mx.repeat(keys, queries.shape[1] // keys.shape[1], axis=1).astype(queries.dtype), scale, sinks)

            life.attended = instead


def needles(tokenizer: Any, text: list[int], length: int) -> list[tuple[list[int], int]]:
    """Prompts of ``length`` tokens that end with the question, each followed by its answer: ids and prompt length."""
    ask, answer = (list(tokenizer.encode(s, add_special_tokens=False)) for s in (NEEDLE, QUESTION))
    hay, out = text[: length - 2 * len(ask) - len(answer)], []
    for depth in DEPTHS:
        at = int(depth * len(hay))
        out.append((hay[:at] + ask + answer + hay[at:] + ask + answer, length))
    return out


def score_needles(model: Any, make: Any, prompts: list[tuple[list[int], int]]) -> tuple[float, float]:
    """Mean log-probability of the answers, and the share whose every token is the model's first choice."""
    logprobs, right = [], []
    for ids, length in prompts:
        run = teacher_force(model, [*ids, 0], make(), length, step=512)
        rows, answer = run.logprobs[: len(ids) - length], np.array(ids[length:])
        logprobs.append(rows[np.arange(len(rows)), answer].sum())
        right.append(bool((rows.argmax(-1) == answer).all()))
    return float(np.mean(logprobs)), float(np.mean(right))


def main(name: str, prompt: int, scored: int, methods: list[MethodName], keys: bool) -> None:
    model, text = common.load(name)
    tokenizer, found = common.tokenizer(name), text[: prompt + scored]
    truth: Reference = reference(model, found, prompt, step=512)
    prompts = needles(tokenizer, text, prompt)
    from mlx_lm.models.cache import make_prompt_cache

    bare = score_needles(model, lambda: make_prompt_cache(model), prompts)
    rows: list[dict[str, Any]] = [row("no dropping", "-", prompt, 1.0, 0.0, 1.0, *bare)]
    for part in (2, 4):
        for label in methods:
            config = KVCacheConfig(method=label, **fields(label, prompt // part, prompt))
            # kvzip scores with a pass of its own, whose queries nothing replaces.
            for fed in (False, True) if keys and label != "kvzip" else (False,):

                def make(fed: bool = fed, config: KVCacheConfig = config) -> list[Any]:
                    caches = KVCacheBuilder.for_model(model, config)
                    if fed:
                        feed_keys(caches)
                    return caches

                if fed and not watches(make()):
                    continue
                caches = make()
                run = teacher_force(model, found, caches, prompt, step=512)
                seen, held = compare(truth, run), cache_report(caches)
                ours = [layer for layer in held.layers if layer.uncompressed]
                kept = float(np.mean([layer.rows for layer in ours])) - (len(run.logprobs) - 1)
                needle = score_needles(model, make, prompts)
                share = sum(layer.nbytes for layer in ours) / (2 * sum(layer.uncompressed for layer in ours))
                queries = "keys instead" if fed else "real" if watches(caches) else "none"
                rows.append(row(label, queries, prompt // part, share, seen.mean_kl, seen.top1_agreement, *needle))
                print(rows[-1], f"rows {kept:.0f}", flush=True)
    settings = {"model": name, "kv": "float32", "prompt": prompt, "scored": scored, "depths": DEPTHS}
    common.show(f"{name}: {prompt} tokens of prompt, {scored} scored", rows)
    common.save(f"eviction_{name}", settings, rows)


def watches(caches: list[Any]) -> bool:
    """Whether what stays depends on queries (a method may also need attention to come back for other reasons)."""
    found = [c._recipe.eviction for c in caches if isinstance(c, CompressedKVCache)]
    policies = [policy for policy in found if policy is not None]
    return any(p.retrieval is not None or (p.score is not None and p.score.needs_queries) for p in policies)


def row(
    label: str, queries: str, budget: int, share: float, kl: float, top1: float, logprob: float, exact: float
) -> dict[str, Any]:
    return {
        "method": label,
        "queries": queries,
        "budget": budget,
        "bytes held / float32": share,
        "mean KL": kl,
        "top-1": top1,
        "needle log-probability": logprob,
        "needle exact": exact,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("smollm2", "gemma3"), nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--scored", type=int, default=32)
    parser.add_argument("--methods", nargs="+", default=None)
    parser.add_argument("--keys", action="store_true", help="also feed keys where queries belong")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for chosen in options.model:
        main(chosen, options.prompt, options.scored, options.methods or dropping(), options.keys)
