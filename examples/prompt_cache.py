"""Read a long text once, keep its compressed cache on disk, ask questions later.

python examples/prompt_cache.py MODEL TEXT FILE     reads TEXT and writes the cache FILE
python examples/prompt_cache.py MODEL FILE          asks a question about it
"""

import copy
import sys

import mlx.core as mx
from mlx_lm import generate, load

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, cache_report, load_cache, save_cache

model, tokenizer = load(sys.argv[1])
if len(sys.argv) == 4:
    text, file = sys.argv[2:]
    with open(text, encoding="utf-8") as opened:
        ids = tokenizer.encode(opened.read())
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi", bit_width_inlier=4))
    for start in range(0, len(ids), 512):
        model(mx.array(ids[start : start + 512])[None], cache=caches)
        mx.eval([cache.state for cache in caches])
    save_cache(file, caches, model)
    print(f"{len(ids)} tokens in {file}")
    print(cache_report(caches, at_rest=True))
else:
    caches = load_cache(sys.argv[2], model)
    for question in ("What is this text about?", "Who is in it?"):
        # A copy for each question: generation goes on in the cache that it is given.
        answer = generate(model, tokenizer, "\n" + question, max_tokens=60, prompt_cache=copy.deepcopy(caches))
        print(question, answer)
