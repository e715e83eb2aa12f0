"""Calibration artifacts: round trip, the model that they belong to, and the refusal of everything else, whole."""

import mlx.core as mx
import numpy as np
import pytest

from tests.models import tiny
from veloxquant_mlx import ArtifactNotFoundError, ArtifactStore, KVCacheBuilder, KVCacheConfig, QuantizerConfigError
from veloxquant_mlx.artifacts import CalibrationArtifact, ModelPrint, calibrated
from veloxquant_mlx.cache.files import save_cache
from veloxquant_mlx.core import ArtifactDamagedError, LayerInfo

FILTERS = {i: {"filters": mx.random.normal((2, 16), key=mx.random.key(i))} for i in (0, 2)}


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "filters.safetensors"
    CalibrationArtifact("qfilters", FILTERS, about={"tokens": 512}).save(path)
    return path


def test_round_trip(saved):
    loaded = CalibrationArtifact.load(saved)
    assert isinstance(loaded, ArtifactStore)
    assert (loaded.method, loaded.indices, loaded.about, loaded.model) == ("qfilters", [0, 2], {"tokens": 512}, None)
    assert all(mx.array_equal(loaded.layer(i)["filters"], FILTERS[i]["filters"]) for i in (0, 2))
    with pytest.raises(ArtifactNotFoundError, match=r"entry 1.*\[0, 2\]"):
        loaded.layer(1)


def test_it_is_a_store_of_rotations_too():
    artifact = CalibrationArtifact("qfilters", {})
    artifact.save_rotation_matrix(mx.eye(4), 4, 7)
    assert artifact.exists("rotation", d=4, seed=7)


@pytest.mark.parametrize("place", np.linspace(0.01, 0.99, 12))
def test_a_flipped_bit_anywhere_is_refused(saved, place):
    data = bytearray(saved.read_bytes())
    data[int(place * len(data))] ^= 1
    saved.write_bytes(data)
    with pytest.raises(ArtifactDamagedError, match="veloxquant calibrate"):
        CalibrationArtifact.load(saved)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(ArtifactDamagedError, match="truncated"):
        CalibrationArtifact.load(saved)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    mx.save_safetensors(str(path), {"0.filters": mx.zeros((2, 16))})
    with pytest.raises(ArtifactDamagedError, match="not written by CalibrationArtifact.save"):
        CalibrationArtifact.load(path)
    save_cache(path, [])
    with pytest.raises(ArtifactDamagedError, match="not written by CalibrationArtifact.save"):
        CalibrationArtifact.load(path)
    with pytest.raises(ArtifactNotFoundError, match="no calibration file"):
        CalibrationArtifact.load(tmp_path / "nowhere.safetensors")


def test_another_model_is_refused(tmp_path):
    def made(name, **kwargs):
        return CalibrationArtifact("qfilters", {}, ModelPrint.of(tiny.build(name, **kwargs)))

    path = tmp_path / "a.safetensors"
    made("llama").save(path)
    loaded = CalibrationArtifact.load(path)
    loaded.check_model(tiny.build("llama"))
    with pytest.raises(QuantizerConfigError, match="another model: its weights are others"):
        loaded.check_model(tiny.build("llama", seed=1))
    with pytest.raises(QuantizerConfigError, match="it is a .*llama, this is a .*qwen2"):
        loaded.check_model(tiny.build("qwen2"))
    with pytest.raises(QuantizerConfigError, match="its positions turn at other rates"):
        made("llama_llama3").check_model(tiny.build("llama_yarn"))
    CalibrationArtifact("qfilters", {}).check_model(tiny.build("llama"))  # tied to no model


def test_a_method_gets_its_layers_arrays():
    config = KVCacheConfig(method="qfilters", store=CalibrationArtifact("qfilters", FILTERS))
    got = calibrated(config, LayerInfo(head_dim=16, kv_heads=2, index=2), filters=(2, 16))
    assert got is not None
    assert mx.array_equal(got["filters"], FILTERS[2]["filters"])
    assert calibrated(config, LayerInfo(index=0), filters=(None, 16)) is not None  # heads not known yet
    assert calibrated(KVCacheConfig(method="qfilters"), LayerInfo(), filters=(2, 16)) is None


@pytest.mark.parametrize(
    ("method", "shapes", "message"),
    [
        ("spectral", {"basis": (2, 16)}, "must be an artifact of 'spectral'"),
        ("qfilters", {"filters": (1, 16)}, r"'filters' has shape \(2, 16\), it must be \(1, 16\)"),
        ("qfilters", {"filters": (2, 16, 1)}, "has shape"),
        ("qfilters", {"filters": (2, 16), "mean": (16,)}, "'mean' has shape None"),
    ],
)
def test_what_does_not_fit_is_refused(method, shapes, message):
    config = KVCacheConfig(method=method, store=CalibrationArtifact("qfilters", FILTERS))
    with pytest.raises(QuantizerConfigError, match=message):
        calibrated(config, LayerInfo(index=0), **shapes)


def test_for_model_refuses_an_artifact_of_another_model():
    model, other = tiny.build("llama"), tiny.build("llama", seed=1)
    config = KVCacheConfig(method="turboquant_rvq", store=CalibrationArtifact("kivi", {}, ModelPrint.of(model)))
    KVCacheBuilder.for_model(model, config)
    with pytest.raises(QuantizerConfigError, match="another model"):
        KVCacheBuilder.for_model(other, config)
