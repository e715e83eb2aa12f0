"""A comparison with a row for every method, its figures made from a seed; no model runs."""

from __future__ import annotations

import random

from veloxquant_mlx.quality import Comparison, Needles, Row, plans
from veloxquant_mlx.quality.results import Model, Text, Uncompressed

LAYERS, WHOLE = 12, 2**24


def needles(rng: random.Random, least: float) -> Needles:
    score = tuple(tuple((float(rng.random() > least), 1.0) for _ in range(3)) for _ in range(2))
    return Needles((256, 1024), (0.1, 0.5, 0.9), ("number", "word"), score)


def row(label: str, method: str, family: str, rng: random.Random) -> Row:
    bits = rng.uniform(2, 9)
    loss = 10 ** rng.uniform(-4, 0)
    held = int(WHOLE * bits / 16)
    return Row(
        label,
        method,
        family,
        bytes={"packed": held, "window": 0, "index": 0, "fixed": 0},
        bytes_16=WHOLE,
        bits=bits,
        ratio=WHOLE / held,
        mean_kl=loss,
        p99_kl=4 * loss,
        top1_flips=rng.random() / 4,
        perplexity_ratio=1 + loss,
        needle=needles(rng, 0.5),
        copy=rng.random(),
        decode_speed=0.5,
        layer_error=tuple(rng.uniform(0.005, 1.2) if i else None for i in range(LAYERS)),
    )


def comparison(*more: Row) -> Comparison:
    """Every plan that ships, and ``more`` rows."""
    rng = random.Random(0)
    rows = [row(plan.label, plan.method, plan.family, rng) for plan in plans(every=True)]
    return Comparison(
        Model("tiny <model>", "f" * 64, LAYERS, 2, 64, 135_000_000),
        Text("book.txt", "a" * 64, 1500),
        1024,
        64,
        7,
        {"mlx": "0.32.4", "numpy": "2.0"},
        "CPU x86_64, 2 cores",
        Uncompressed(12.5, needles(rng, 0.0), 0.9, 10.0, 2**20),
        (*rows, *more),
    )
