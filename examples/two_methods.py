"""Two methods on one cache: the first drops tokens, the second packs those that stay.

python examples/two_methods.py MODEL
"""

import sys

from mlx_lm import generate, load

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, cache_report

model, tokenizer = load(sys.argv[1])
story = "The keeper of the lighthouse wrote down every ship. " * 200
prompt = story + "What did the keeper write down?"

keep = KVCacheConfig(method="snapkv", snap_budget=512)
pack = KVCacheConfig(method="kivi", bit_width_inlier=4)
for name, config in (("snapkv", keep), ("kivi", pack), ("snapkv + kivi", [keep, pack])):
    caches = KVCacheBuilder.for_model(model, config)
    answer = generate(model, tokenizer, prompt, max_tokens=24, prompt_cache=caches)
    report = cache_report(caches)
    print(f"{name}: {report.nbytes:,} bytes, {report.ratio:.1f}x smaller than 16 bits: {answer}")
