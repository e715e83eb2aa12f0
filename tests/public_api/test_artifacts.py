"""Artifact stores: round trips, absence, damage, odd names."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_mlx import ArtifactNotFoundError, ArtifactStore, QuantizerConfigError
from veloxquant_mlx.artifacts import InMemoryArtifactStore, NpyArtifactStore
from veloxquant_mlx.core import ArtifactDamagedError

KINDS = {
    "rotation": ("rotation_matrix", {"d": 4, "seed": 7}),
    "codebook": ("codebook", {"distribution": "beta", "b": 2, "d": 4}),
    "jl": ("jl_matrix", {"d": 4, "m": 8, "seed": 7}),
}


@pytest.fixture(params=["memory", "npy"])
def store(request, tmp_path) -> ArtifactStore:
    return InMemoryArtifactStore() if request.param == "memory" else NpyArtifactStore(tmp_path / "new" / "folder")


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(store, kind):
    verb, parameters = KINDS[kind]
    array = mx.random.normal((4, 4), key=mx.random.key(0))
    assert not store.exists(kind, **parameters)
    getattr(store, f"save_{verb}")(array, **parameters)
    assert store.exists(kind, **parameters)
    loaded = getattr(store, f"load_{verb}")(**parameters)
    assert loaded.dtype == array.dtype
    assert mx.array_equal(loaded, array)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_artifact_is_named(store, kind):
    verb, parameters = KINDS[kind]
    getattr(store, f"save_{verb}")(mx.ones((4, 4)), **{**parameters, "d": 5})
    with pytest.raises(ArtifactNotFoundError, match=rf"no {kind} with .*d=4"):
        getattr(store, f"load_{verb}")(**parameters)


def test_saving_again_replaces(store):
    for value in (1.0, 2.0):
        store.save_codebook(mx.full((2,), value), "beta", 1, 4)
    assert store.load_codebook("beta", 1, 4).tolist() == [2.0, 2.0]


def test_numpy_and_bfloat16_are_accepted(store):
    store.save_rotation_matrix(np.eye(3, dtype=np.float32), 3, 0)
    assert mx.array_equal(store.load_rotation_matrix(3, 0), mx.eye(3))
    store.save_rotation_matrix((mx.eye(3) / 3).astype(mx.bfloat16), 3, 1)
    assert mx.array_equal(store.load_rotation_matrix(3, 1), (mx.eye(3) / 3).astype(mx.bfloat16).astype(mx.float32))


@pytest.mark.parametrize("name", ["../escape", "a/b", "nul\0", "a b%c", "", "ü", "a-b1-d4"])
def test_odd_names_stay_inside_and_apart(tmp_path, name):
    store = NpyArtifactStore(tmp_path / "root")
    store.save_codebook(mx.zeros((2,)), "a", 1, 4)
    store.save_codebook(mx.ones((2,)), name, 1, 4)
    assert store.load_codebook(name, 1, 4).tolist() == [1.0, 1.0]
    assert store.load_codebook("a", 1, 4).tolist() == [0.0, 0.0]
    assert [p.name for p in tmp_path.iterdir()] == ["root"]


def test_files_survive_the_store(tmp_path):
    NpyArtifactStore(tmp_path).save_jl_matrix(mx.ones((8, 4)), 4, 8, 7)
    assert NpyArtifactStore(str(tmp_path)).load_jl_matrix(4, 8, 7).shape == (8, 4)


@pytest.mark.parametrize("content", [b"", b"not an array", None])
def test_damaged_file_is_refused_and_named(tmp_path, content):
    store = NpyArtifactStore(tmp_path)
    store.save_rotation_matrix(mx.eye(16), 16, 0)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5] if content is None else content)
    with pytest.raises(ArtifactDamagedError, match=rf"{file.name}.*delete it"):
        store.load_rotation_matrix(16, 0)


@pytest.mark.parametrize("array", [np.array("x"), np.eye(4, dtype=complex), np.zeros(4, dtype=[("a", "f4")])])
def test_a_file_of_other_things_than_real_numbers_is_damaged(tmp_path, array):
    store = NpyArtifactStore(tmp_path)
    np.save(tmp_path / "rotation-d4-seed0.npy", array)
    with pytest.raises(ArtifactDamagedError, match=r"not real numbers.*delete it"):
        store.load_rotation_matrix(4, 0)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    store = NpyArtifactStore(tmp_path)
    store.save_rotation_matrix(mx.eye(2), 2, 0)

    def broken(file, array, **kwargs):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "save", broken)
    with pytest.raises(OSError, match="disk full"):
        store.save_rotation_matrix(mx.zeros((2, 2)), 2, 0)
    assert mx.array_equal(store.load_rotation_matrix(2, 0), mx.eye(2))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        ("mask", {"d": 4}, "artifact_type='mask'.*'rotation', 'codebook', 'jl'"),
        ("rotation", {"d": 4}, "d, seed"),
        ("rotation", {"d": 4, "seed": 1, "m": 2}, "d, seed"),
    ],
)
def test_exists_refuses_wrong_questions(store, kind, parameters, message):
    with pytest.raises(QuantizerConfigError, match=message):
        store.exists(kind, **parameters)
