"""Budgets of layers: how a mean number of tokens is spread over the layers of a model, sums being exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

# Layers whose numbers differ by less are alike.
SAME = 1e-6


@dataclass(frozen=True)
class Pyramid:
    """The budget of layer ``rank`` of ``layers``, in an arithmetic sequence that falls with the depth.

    ``mean`` tokens per layer on average; the last layer gets ``mean / beta``. ``window`` tokens are always kept and no
    layer gets fewer than ``least``. Cai et al., "PyramidKV", arXiv:2406.02069. ``most`` caps it.
    """

    rank: int
    layers: int
    mean: int
    beta: float
    window: int
    least: int
    most: int | None = None

    def __call__(self, length: int) -> int:
        """The budget for a prompt of ``length`` tokens, window and sinks included."""
        budget = pyramid(self.layers, self.mean, self.beta, self.window, self.least, length)[self.rank]
        return budget if self.most is None else min(budget, self.most)


@lru_cache(maxsize=64)
def pyramid(layers: int, mean: int, beta: float, window: int, least: int, length: int) -> tuple[int, ...]:
    """Budgets of all layers. They sum to ``layers * mean`` and do not rise with the depth.

    Where the sequence does not fit between ``window`` and ``length`` every layer gets the mean.
    """
    low = mean / beta
    high = 2 * mean - low
    if high >= length - window:
        high = length - window
        low = 2 * mean - high
    if layers == 1 or not length >= high >= low >= window:
        return (mean,) * layers
    budgets = rounded([high - rank * (high - low) / (layers - 1) for rank in range(layers)], layers * mean)
    budgets = [max(budget, least) for budget in budgets]
    for _ in range(sum(budgets) - layers * mean):  # what the smallest were given comes from the largest
        budgets[max(range(layers), key=lambda rank: (budgets[rank], rank))] -= 1
    return tuple(budgets)


def rounded(shares: Sequence[float], total: int) -> list[int]:
    """Integers with the sum ``total``, each at most 1 from its share: the largest remainders are rounded up."""
    whole = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (whole[i] - shares[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def squeezed(cosines: Sequence[float], mean: int, smallest: int) -> list[int]:
    """Budgets of layers: ``smallest`` for those whose attention changes least, what they give up for the others.

    ``cosines`` tell how alike the hidden states before and after each layer's attention are. They are split into three
    clusters; the one of the highest is left with ``smallest``. With fewer than three layers, or where all are alike,
    every layer gets the ``mean``. The sum is always ``len(cosines) * mean``: what does not divide goes to the layers
    of the lowest cosines. Wang et al., "SqueezeAttention", arXiv:2404.04793.
    """
    n = len(cosines)
    if n < 3 or max(cosines) - min(cosines) <= SAME:
        return [mean] * n
    clusters = three_means(cosines)
    giving = [i for i in range(n) if clusters[i] == max(clusters)]
    others = sorted((i for i in range(n) if i not in giving), key=lambda i: (cosines[i], i))
    each, over = divmod(n * mean - len(giving) * smallest, len(others))
    budgets = [smallest] * n
    for place, i in enumerate(others):
        budgets[i] = each + (place < over)
    return budgets


def three_means(values: Sequence[float]) -> list[int]:
    """The cluster of each value, 0 for the lowest: the split into three with the least squared distance to the means.

    Exact, by dynamic programming over the sorted values. Values that are alike share a cluster, so that there are
    fewer than three clusters where there are fewer than three different values.
    """
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    groups: list[list[int]] = []
    for i in order:
        if groups and values[i] - values[groups[-1][-1]] <= SAME:
            groups[-1].append(i)
        else:
            groups.append([i])

    def cost(start: int, stop: int) -> float:
        part = [values[i] for group in groups[start:stop] for i in group]
        middle = sum(part) / len(part)
        return sum((x - middle) ** 2 for x in part)

    # best[stop]: cost of the first ``stop`` groups in the clusters so far, and where each cluster starts.
    best: list[tuple[float, list[int]]] = [(cost(0, stop), [0]) for stop in range(1, len(groups) + 1)]
    for k in range(1, min(3, len(groups))):
        best = [
            min((best[start - 1][0] + cost(start, stop), [*best[start - 1][1], start]) for start in range(k, stop))
            if stop > k
            else best[stop - 1]
            for stop in range(1, len(groups) + 1)
        ]
    starts = best[-1][1]
    clusters = [0] * len(values)
    for place, group in enumerate(groups):
        for i in group:
            clusters[i] = sum(place >= start for start in starts) - 1
    return clusters
