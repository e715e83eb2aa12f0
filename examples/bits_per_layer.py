"""Measure which layers need bits, spread 3 bits on average over them, and try both on the text that follows.

python examples/bits_per_layer.py MODEL TEXT
"""

import sys

from mlx_lm import load

from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.calibrate import layer_sensitivity
from veloxquant_mlx.quality import measure

LENGTH = 512  # tokens, half of them prompt

model, tokenizer = load(sys.argv[1])
with open(sys.argv[2], encoding="utf-8") as opened:
    ids = tokenizer.encode(opened.read())

plain = KVCacheConfig(method="kivi", bit_width_inlier=3, residual_length=32)
found = layer_sensitivity(model, ids[:LENGTH], plain)
bits = found.full(found.allocate(3.0))
chosen = KVCacheConfig(method="kivi", bit_width_inlier=bits, residual_length=32)
print(f"KVCacheConfig(method='kivi', bit_width_inlier={bits}, residual_length=32)")
for name, config in (("3 bits in every layer", plain), ("3 bits on average", chosen)):
    seen = measure(
        model, ids[LENGTH : 2 * LENGTH], lambda config=config: KVCacheBuilder.for_model(model, config), LENGTH // 2
    )
    print(f"{name}: mean KL {seen.mean_kl:.4f} nats, {seen.ratio:.2f}x smaller")
