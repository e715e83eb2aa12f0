"""Whether bits per layer pay: kivi at 3 bits on average against 3 bits in every layer, SmolLM2-135M and Gemma 3 270M.

The bits are chosen on the first 512 tokens of the committed text, then both lists are compared on these and on the next
512: mean KL of the predictions over the second half, made 32 tokens at a time from caches that hold the first half.
The model and its keys and values are in float32. Gemma has only 3 full-attention layers of 18 to choose for;
its 512 tokens (allocation_gemma3_512.json) were too few to tell, so it was run again with 700, all that the text has.
"""

from __future__ import annotations

import argparse
import time

from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.calibrate import divergences, layer_sensitivity

from . import common

CONFIG = KVCacheConfig(method="kivi", residual_length=32)
CHOICES = (2, 3, 4, 5)


def main(name: str, tokens: int, average: int) -> None:
    model, text = common.load(name)
    began = time.process_time()
    found = layer_sensitivity(model, text[:tokens], CONFIG, choices=CHOICES)
    measuring = time.process_time() - began
    bits = found.allocate(average)
    lists = {"uniform": found.blind(average), "allocated": bits}
    head = text[:1] if name == "gemma3" else []  # its tokenizer puts <bos> before every text
    rows = []
    for part, ids in (("chosen on", text[:tokens]), ("other", head + text[tokens : 2 * tokens - len(head)])):
        measured = divergences(model, ids, CONFIG, [found.full(b) for b in lists.values()])
        for (label, chosen), kl in zip(lists.items(), measured, strict=True):
            rows.append({"bits": label, "text": part, "expected KL": found.predict(chosen), "mean KL": kl})
    settings = {
        "model": name,
        "method": "kivi, residual_length 32",
        "tokens": tokens,
        "average": average,
        "choices": list(CHOICES),
        "probe": found.probe,
        "layers": list(found.indices),
        "allocated": bits,
        "divergence of one layer at the probe": found.divergence,
        "expected gain and its standard error": found.gain(bits, lists["uniform"]),
        "CPU seconds to measure": measuring,
    }
    common.show(f"{name}: {average} bits on average, {tokens} tokens: {bits}", rows)
    common.save(f"allocation_{name}", settings, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("smollm2", "gemma3"), nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--average", type=int, default=3)
    options = parser.parse_args()
    for chosen in options.model:
        main(chosen, options.tokens, options.average)
