"""Cache files: bit-identical on return, refused whole when anything is wrong with them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.matrix import IDS, ROWS, Row, identical, same_state
from tests.models import tiny
from tests.models.running import caches_of, prefill
from veloxquant_mlx import CacheStateError, load_cache, save_cache
from veloxquant_mlx.cache import files
from veloxquant_mlx.cache.batch import CompressedBatchCache
from veloxquant_mlx.cache.layer import CompressedKVCache

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
        patch.setattr(files, "FORMAT", 99)
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
