"""Generate with a compressed cache, and see what it holds.

python examples/quickstart.py MODEL
"""

import sys

from mlx_lm import generate, load

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, cache_report

model, tokenizer = load(sys.argv[1])
prompt = "Tell me a story about a lighthouse."
if tokenizer.chat_template is not None:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)

caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="kivi", bit_width_inlier=4))
print(generate(model, tokenizer, prompt, max_tokens=200, prompt_cache=caches))
print(cache_report(caches))
