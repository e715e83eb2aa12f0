"""Cache files: bit-identical on return, refused whole when anything is wrong with them."""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.matrix import IDS, ROWS, Row, feed, identical, same_state, tensors
from tests.models import tiny
from tests.models.running import caches_of, prefill
from veloxquant_mlx import CacheStateError, cache_report, load_cache, save_cache
from veloxquant_mlx.cache import files, rest
from veloxquant_mlx.cache.batch import CompressedBatchCache
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.rest import AtRest
from veloxquant_mlx.codecs.symmetric import TokenSymmetric
from veloxquant_mlx.core.text import size
from veloxquant_mlx.core.types import LayerInfo, Recipe, Stream
from veloxquant_mlx.methods import cachegen

MODELS = {name: tiny.build(name) for name in ("llama", "gemma3_text", "qwen3_next")}
PROMPT = tiny.tokens(150)


def filled(model: Any, row: Row) -> list[Any]:
    caches = caches_of(model, row)
    prefill(model, caches, PROMPT, 100)
    return caches


@pytest.mark.covers("save/load")
@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(row: Row, name: str, tmp_path: Path) -> None:
    """Compressed, sliding and recurrent layers come back; generation goes on bit for bit; the file is no larger."""
    model, file = MODELS[name], tmp_path / "prompt.safetensors"
    caches = filled(model, row)
    save_cache(file, caches, model)
    loaded = load_cache(file, model)
    assert [type(c) for c in loaded] == [type(c) for c in caches]
    ours = [(a, b) for a, b in zip(caches, loaded, strict=True) if isinstance(a, CompressedKVCache)]
    assert ours and all(same_state(a, b) and a.offset == b.offset for a, b in ours)
    for i in range(5):
        token = PROMPT[:, i : i + 1]
        assert identical(model(token, cache=caches), model(token, cache=loaded))
    headers = 8192 * len(caches)  # names, shapes and configurations
    assert file.stat().st_size <= sum(c.nbytes for c in caches) + headers
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


def test_saved_again_is_the_same(tmp_path: Path) -> None:
    """Loading does not encode anything anew: codes of old tokens survive any number of trips."""
    model, one, two = MODELS["llama"], tmp_path / "one", tmp_path / "two"
    save_cache(one, filled(model, ROWS[0]))
    save_cache(two, load_cache(one, model))
    assert one.read_bytes() == two.read_bytes()


CODED = next(row for row in ROWS if row.method == "cachegen")


@pytest.mark.parametrize("tokens", [5, 40, 2300])
def test_codes_are_entropy_coded_and_come_back(tokens: int, tmp_path: Path) -> None:
    """Bit for bit, buffers and their room to grow included; the receipt says what the file really takes."""
    model, file = MODELS["llama"], tmp_path / "prompt.safetensors"
    sizes = {}
    for per_channel in (True, False):
        caches = caches_of(model, replace(CODED, fields=CODED.fields | {"cachegen_per_channel": per_channel}))
        info = caches[0].layer
        data = tensors(tokens, (1, info.kv_heads or 0, info.head_dim, info.value_dim))
        for cache in caches:
            cache.append(data.k, data.v)
            cache.settle()
        save_cache(file, caches)
        loaded = load_cache(file, model)
        assert all(same_state(a, b) for a, b in zip(caches, loaded, strict=True))
        before = file.read_bytes()
        save_cache(file, loaded)
        assert file.read_bytes() == before
        report = cache_report(caches, at_rest=True)
        assert report.at_rest is not None
        stored: Any = mx.load(str(file), format="safetensors")
        arrays = {name: a for name, a in stored.items() if not name.endswith(".0")}  # that is the header
        assert report.at_rest.nbytes == sum(a.nbytes for a in arrays.values())
        assert report.at_rest.coded == sum(a.nbytes for a in arrays.values() if a.dtype == mx.uint8)
        assert report.at_rest.entropy < report.at_rest.coded or tokens < 10
        sizes[per_channel] = report.at_rest.coded
    if tokens > 2000:  # tables pay: some channels of the keys are far wider than the others
        held = sum(a.nbytes for name, a in caches[0].arrays().items() if name.endswith(("words", "anchors")))
        assert sizes[True] < 0.99 * sizes[False] and sizes[False] < 0.95 * held * len(caches)


def test_blocks_of_a_whole_prompt_are_coded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def recipe(_: Any, layer: LayerInfo) -> Recipe:
        stream = Stream(TokenSymmetric(4, dim=layer.head_dim), prompt=TokenSymmetric(3, dim=layer.head_dim))
        return Recipe(stream, stream, deferred=True)

    monkeypatch.setattr(cachegen, "recipe", recipe)
    model, file = MODELS["llama"], tmp_path / "prompt.safetensors"
    caches = filled(model, CODED)
    assert set(rest.symbols(caches[0])) == {f"{s}.{part}words" for s in "kv" for part in ("", "prompt.")}
    assert "k.prompt.words" in caches[0].arrays()
    save_cache(file, caches)
    stored: Any = mx.load(str(file), format="safetensors")
    assert sum(a.dtype == mx.uint8 for a in stored.values()) > len(caches)  # more than the headers
    assert all(same_state(a, b) for a, b in zip(caches, load_cache(file, model), strict=True))


def test_receipt_tells_encoded_bytes_from_entropy() -> None:
    caches = [CODED.cache((1, 2, 64, 64)), ROWS[0].cache()]
    for cache in caches:
        feed(cache, tensors(300), [300])
    plain, report = cache_report(caches), cache_report(caches, at_rest=True)
    assert plain.at_rest is None and "at rest" not in str(plain) and plain == report
    coded, bare = (layer.at_rest for layer in report.layers)
    assert coded and bare and coded.entropy < coded.coded < coded.nbytes < caches[0].nbytes
    assert bare == AtRest(sum(a.nbytes for a in caches[1].arrays().values()), 0, 0)
    last = str(report).splitlines()[-1]
    assert last.startswith(f"at rest {size(coded.nbytes + bare.nbytes)}, as save_cache writes it")
    assert f"{size(coded.coded)} of that are entropy-coded bytes" in last
    assert f"a bound that is not reached, is {size(coded.entropy)}" in last
    batch = cache_report([CompressedBatchCache([caches[0], CODED.cache()])], at_rest=True)
    assert batch.at_rest == coded


def test_files_of_before_entropy_coding_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 0.1 named no coded arrays."""
    model, file = MODELS["llama"], tmp_path / "prompt.safetensors"
    caches = filled(model, ROWS[0])
    plain = json.dumps
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", lambda x: plain(x).replace(', "coded": {}', ""))
        save_cache(file, caches)
    assert b"coded" not in file.read_bytes()
    assert all(same_state(a, b) for a, b in zip(caches, load_cache(file, model), strict=True))


def edited(file: Path, change: str) -> None:
    """Damage a good file in one way."""
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    head, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    if change == "one bit":
        body = body[:-3] + bytes([body[-3] ^ 1]) + body[-2:]
    elif change == "truncated":
        body = body[: len(body) // 2]
    elif change == "half a header":
        file.write_bytes(data[: size // 2])
        return
    elif change == "foreign":
        head.pop("__metadata__")
    elif change == "header":
        head["__metadata__"]["veloxquant_mlx"] = head["__metadata__"]["veloxquant_mlx"].replace("KVCache", "KVCqche")
    elif change == "text":
        file.write_text("not a cache")
        return
    text = json.dumps(head).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.mark.parametrize("change", ["one bit", "truncated", "half a header", "foreign", "header", "text"])
def test_bad_files_are_refused(change: str, tmp_path: Path) -> None:
    model, file = MODELS["llama"], tmp_path / "prompt.safetensors"
    save_cache(file, filled(model, ROWS[0]))
    edited(file, change)
    with pytest.raises(CacheStateError, match=r"prompt\.safetensors"):
        load_cache(file, model)


def test_bit_flips_anywhere(tmp_path: Path) -> None:
    """Sixty flips over the whole file, header and names included: nearly all refused, the rest of no consequence."""
    model, file = MODELS["gemma3_text"], tmp_path / "prompt.safetensors"
    caches = filled(model, ROWS[0])
    save_cache(file, caches)
    data, refused = file.read_bytes(), 0
    for i in range(60):
        at = i * len(data) // 60 if i % 2 else i * 40
        file.write_bytes(data[:at] + bytes([data[at] ^ (1 << i % 7)]) + data[at + 1 :])
        try:
            loaded = load_cache(file, model)
        except CacheStateError:
            refused += 1
            continue
        for a, b in zip(caches, loaded, strict=True):
            leaves: Any = zip(tree_flatten(a.state), tree_flatten(b.state), strict=True)
            for x, y in leaves:
                assert identical(x[1], y[1]) if isinstance(x[1], mx.array) else x == y
    assert refused >= 50  # what is left are spaces and names that nobody reads


def test_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = MODELS["llama"], tmp_path / "prompt.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(files, "FILE", dataclasses.replace(files.FILE, version=99))
        save_cache(file, filled(model, ROWS[0]))
    with pytest.raises(CacheStateError, match="format 99; this version reads 1"):
        load_cache(file, model)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no cache file"):
        load_cache(tmp_path / "none", MODELS["llama"])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("gemma3_text", "caches"),
        ("other weights", "other weights"),
        ("other rope", "another rate"),
        ("mla", "leaves that layer alone"),
    ],
)
def test_wrong_model_is_refused(other: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.safetensors"
    model = MODELS["llama"]
    save_cache(file, filled(model, ROWS[0]), model if other == "other weights" else None)
    wrong = {
        "gemma3_text": lambda: MODELS["gemma3_text"],
        "other weights": lambda: tiny.build("llama", seed=5),
        "other rope": lambda: tiny.build("llama_llama3"),
        "mla": lambda: tiny.build("deepseek_v3"),
    }[other]()
    with pytest.raises(CacheStateError, match=message):
        load_cache(file, wrong)


def test_failed_save_leaves_the_older_file(tmp_path: Path) -> None:
    model, file = MODELS["llama"], tmp_path / "prompt.safetensors"
    save_cache(file, filled(model, ROWS[0]))
    before = file.read_bytes()
    with pytest.raises(CacheStateError, match=r"one by one: extract\(i\)"):
        save_cache(file, [CompressedBatchCache([ROWS[0].cache()])])
    with pytest.raises(FileNotFoundError):
        save_cache(tmp_path / "no such folder" / "file", [])
    assert file.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [file.name]
