"""When caches attend by kernels, what their receipts say, and that a kernel which is wrong is found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import emulation
from tests.matrix import tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.attention import kernels
from veloxquant_mlx.attention.entry import Path
from veloxquant_mlx.attention.kernels import decode, launch, tensor, trust
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.core.exceptions import KernelUnavailableError
from veloxquant_mlx.core.types import LayerInfo

SHAPE = (1, 2, 64, 64)
N = 200
FIELDS: dict[str, dict[str, Any]] = {
    "kivi": {"method": "kivi", "residual_length": 32},
    "turboquant_rvq": {"method": "turboquant_rvq"},
}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that the emulation stands for; what was found on other devices is forgotten."""
    monkeypatch.setattr(launch, "backend", lambda: "cuda")
    monkeypatch.setattr(launch, "run", emulation.run)
    monkeypatch.setattr(trust, "_verdicts", {})
    monkeypatch.setattr(tensor, "LEAST", 64)
    monkeypatch.setattr(trust, "ROWS", 100)


def attended(length: int = 1, rows: mx.Dtype = mx.float32, **fields: Any) -> tuple[CompressedKVCache, mx.array]:
    """A cache of ``N`` tokens of dtype ``rows``, and its attention of the last ``length`` ones."""
    cache = CompressedKVCache(KVCacheConfig(head_dim=64, **fields), LayerInfo(head_dim=64, value_dim=64, kv_heads=2))
    data = tensors(N, SHAPE, dtype=rows)
    for part in (data.part(0, N - length), data.part(N - length, N)):
        cache.update_and_fetch(part.k, part.v)
        q = mx.random.normal((1, 6, part.k.shape[2], 64), key=mx.random.key(1)).astype(rows)
        out = cache.attend(q, scale=0.125, mask="causal" if q.shape[2] > 1 else None)
    return cache, out


@pytest.mark.parametrize("method", FIELDS)
@pytest.mark.parametrize(("dtype", "limit"), [(mx.float32, 2e-5), (mx.float16, 4e-3)], ids=["float32", "float16"])
def test_decoding_goes_through_a_kernel_by_default(method: str, dtype: mx.Dtype, limit: float) -> None:
    """float32 sums in another order; in float16 the half precision of products and output."""
    cache, out = attended(rows=dtype, **FIELDS[method])
    assert Path.KERNEL.value in cache.describe()["attention"] and not cache.describe()["notes"]
    other, wanted = attended(rows=dtype, use_metal_kernels=False, **FIELDS[method])
    assert Path.KERNEL.value not in other.describe()["attention"]
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), np.array(wanted.astype(mx.float32)), atol=limit)


def test_half_precision_is_for_models_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def run(program: launch.Program, *args: Any) -> list[mx.array]:
        names.append(program.name)
        return emulation.run(program, *args)

    monkeypatch.setattr(launch, "run", run)
    attended(**FIELDS["kivi"])
    assert set(names) == {"decode"}
    attended(rows=mx.float16, **FIELDS["kivi"])
    assert "tensor" in names
    names.clear()
    attended(rows=mx.float16, dtype=mx.float32, **FIELDS["kivi"])
    assert "tensor" not in names


LONG = kernels.MOST_ROWS // 3 + 1  # three query heads per kv head


@pytest.mark.parametrize(
    ("fields", "used", "note"),
    [
        ({}, False, ""),
        ({"fused_sdpa": None}, False, ""),
        ({"fused_sdpa": None, "fused_sdpa_memory_bound": True}, True, ""),
        ({"fused_sdpa": True}, True, ""),
        ({"fused_sdpa": True, "fused_sdpa_max_ctx": N - 1}, False, "fused_sdpa_max_ctx=199"),
        ({"fused_sdpa": True, "fused_sdpa_max_ctx": N}, True, ""),
    ],
    ids=["default", "auto", "memory", "must", "too-long", "long-enough"],
)
def test_prompts(fields: dict[str, Any], used: bool, note: str) -> None:
    """The second chunk of a prompt meets packed rows: block by block, or by the kernel where that is wanted."""
    cache, out = attended(LONG, **FIELDS["kivi"], **fields)
    receipt = cache.describe()
    assert (Path.KERNEL.value in receipt["attention"]) == used
    assert any(note in text for text in receipt["notes"]) if note else not receipt["notes"]
    _, wanted = attended(LONG, use_metal_kernels=False, **FIELDS["kivi"])
    np.testing.assert_allclose(np.array(out), np.array(wanted), atol=2e-5)  # float32 sums in another order


def test_what_no_kernel_reads_is_said() -> None:
    cache, _ = attended(method="nsnquant", residual_length=32)
    assert any("no kernel for" in text for text in cache.describe()["notes"])
    with pytest.raises(KernelUnavailableError, match="use_metal_kernels=True cannot be kept: no kernel for"):
        attended(method="nsnquant", residual_length=32, use_metal_kernels=True)


def broken(wrong: Callable[[str], bool], failure: Exception | None) -> Callable[..., list[mx.array]]:
    """A device on which some programs fail or give wrong numbers."""

    def run(program: launch.Program, *args: Any) -> list[mx.array]:
        out = emulation.run(program, *args)
        if not wrong(program.name):
            return out
        if failure is not None:
            raise failure
        return [a + 1 for a in out]

    return run


@pytest.mark.parametrize("failure", [None, RuntimeError("Failed to compile kernel: no such word")])
def test_a_kernel_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch, failure: Exception | None) -> None:
    """Numbers of the reference path, and a line in the receipt; with a demand an error."""
    monkeypatch.setattr(launch, "run", broken(lambda name: True, failure))
    cache, out = attended(**FIELDS["kivi"])
    receipt = cache.describe()
    assert Path.KERNEL.value not in receipt["attention"]
    assert any(("no such word" if failure else "wrong on this device") in text for text in receipt["notes"])
    _, wanted = attended(use_metal_kernels=False, **FIELDS["kivi"])
    assert bool(mx.all(out == wanted))
    with pytest.raises(KernelUnavailableError, match="use_metal_kernels=True"):
        attended(use_metal_kernels=True, **FIELDS["kivi"])


def test_without_tensor_cores_the_plain_kernel_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run", broken(lambda name: name == "tensor", RuntimeError("no tensor cores")))
    cache, _ = attended(rows=mx.float16, **FIELDS["kivi"])
    receipt = cache.describe()
    assert Path.KERNEL.value in receipt["attention"]
    assert any("no tensor cores" in text for text in receipt["notes"])


@pytest.mark.parametrize(
    "fields",
    [
        {"fused_sdpa_memory_bound": True},
        {"fused_sdpa_max_ctx": 100},
        {"use_metal_kernels": False, "fused_sdpa": True},
    ],
)
def test_fields_without_an_effect_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(QuantizerConfigError, match="fused_sdpa"):
        KVCacheFactory.create(KVCacheConfig(method="kivi", **fields))


def test_a_demand_where_there_is_a_kernel() -> None:
    KVCacheFactory.create(KVCacheConfig(method="kivi", use_metal_kernels=True, fused_sdpa=True))


def decoded(cache: CompressedKVCache, start: int, stop: int) -> list[np.ndarray]:
    """Attention of tokens ``start`` to ``stop``, one by one."""
    data, out = tensors(N, SHAPE), []
    for i in range(start, stop):
        part = data.part(i, i + 1)
        cache.update_and_fetch(part.k, part.v)
        q = mx.random.normal((1, 6, 1, 64), key=mx.random.key(i))
        out.append(np.array(cache.attend(q, scale=0.125)))
    return out


@pytest.mark.parametrize("method", FIELDS)
def test_steps_share_a_plan_as_long_as_it_fits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan while rows are packed and buffers grow; another once nothing is packed, and for a mask."""
    plans: list[decode.Plan] = []

    class Counted(decode.Plan):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            plans.append(self)

    caches, data = [], tensors(N, SHAPE)
    for wanted in (None, False):
        config = KVCacheConfig(head_dim=64, use_metal_kernels=wanted, **FIELDS[method])
        caches.append(CompressedKVCache(config, LayerInfo(head_dim=64, value_dim=64, kv_heads=2)))
        part = data.part(0, 60)
        caches[-1].update_and_fetch(part.k, part.v)
        caches[-1].attend(part.q, scale=0.125, mask="causal")
        decoded(caches[-1], 60, 61)  # kernels are tried here, by plans of their own
    monkeypatch.setattr(decode, "Plan", Counted)

    def same(start: int, stop: int) -> None:
        for out, wanted in zip(*(decoded(cache, start, stop) for cache in caches), strict=True):
            np.testing.assert_allclose(out, wanted, atol=2e-5)  # float32 sums in another order

    same(61, 140)
    assert len(plans) == 0
    kept = caches[0]._kernels._plan
    assert kept is not None and kept.keys.codes is kept.values.codes is None  # arrays that are outgrown are let go
    q = mx.random.normal((1, 6, 1, 64), key=mx.random.key(3))
    seen = mx.arange(140)[None] > 70
    out, wanted = (np.array(cache.attend(q, scale=0.125, mask=seen)) for cache in caches)
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    assert len(plans) == 1
    for cache in caches:
        cache.trim(130)
    same(10, 40)  # at first nothing is packed, then perhaps values only: a form that is tried first
    known = len(plans)
    assert known > 1
    same(40, 50)
    assert len(plans) == known
