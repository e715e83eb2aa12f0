"""The golden fixture itself, against the check values of its specification."""

from __future__ import annotations

import numpy as np

from tests import fixture


def test_check_values() -> None:
    """Eight decimals are given: half a unit of the last one."""
    for got, want in (
        (fixture.Q[0, 0, :3], [-1.91838926, -1.93380861, 0.17262318]),
        (fixture.K[0, 0, :3], [0.57552201, -0.28322582, 0.49177172]),
        (fixture.V[0, 0, :3], [0.37411338, -1.97416977, -1.99721358]),
        (fixture.V[1, 47, 7], -1.60695738),
    ):
        assert np.allclose(got, want, rtol=0, atol=5.1e-9)


def test_weights_are_causal_and_sum_to_one() -> None:
    assert np.allclose(fixture.A.sum(-1), 1, atol=1e-12)
    assert not np.triu(fixture.A, 1).any()


def test_a_real_cache_takes_it() -> None:
    """Below its budget a method keeps all, whatever the chunks, and answers as plain attention does."""
    want = np.einsum("hij,hjd->hid", fixture.A, np.repeat(fixture.V, 2, axis=0))
    for chunks in ([48], [7] * 6 + [6], [47, 1]):
        cache = fixture.new_cache("snapkv")
        assert np.allclose(np.array(fixture.fill(cache, chunks)[0]), want, atol=1e-5)  # float32, 48 terms
        assert fixture.kept(cache) == [list(range(48))]


def test_selection_prefers_protected_then_older() -> None:
    assert fixture.top(np.array([[1.0, 3, 3, 3, 0]]), 3, [4]) == [[1, 2, 4]]
