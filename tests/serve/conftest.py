"""One tiny model on the disk for all tests of the server, and one running server for those that need no other."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.served import KIVI, make_folder
from veloxquant_mlx.serve import ServeOptions, Server


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Serves ``folder`` with kivi; stops at the end of a test file."""
    with Server(ServeOptions(str(folder), port=0), KIVI) as running:
        yield running
