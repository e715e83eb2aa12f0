"""Several prompts at once: code of mlx_lm that asks the model for caches gets compressed ones.

python examples/batch.py MODEL
"""

import sys

from mlx_lm import batch_generate, load

from veloxquant_mlx import KVCacheConfig, attach

QUESTIONS = ("Name three rivers.", "What is the capital of France?", "Count from one to five.")

model, tokenizer = load(sys.argv[1])
prompts = [
    tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    if tokenizer.chat_template is not None
    else tokenizer.encode(text)
    for text in QUESTIONS
]
with attach(model, KVCacheConfig(method="kivi", bit_width_inlier=4, residual_length=32)):
    answers = batch_generate(model, tokenizer, prompts, max_tokens=40)
for question, answer in zip(QUESTIONS, answers.texts, strict=True):
    print(f"{question} {answer}")
