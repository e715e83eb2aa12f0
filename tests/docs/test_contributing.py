"""The method of docs/contributing.md, written and registered as the page says, in a copy of the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS, ROOT, blocks

# Of the property tests: bytes, chunk invariance and trim stand for all, which take a minute.
PROPERTIES = ("test_bytes.py", "test_chunks.py", "test_trim.py")
USE = """
from tests.models import tiny
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, QuantizerConfigError, cache_report
from veloxquant_mlx.methods.plain import PlainOptions

model = tiny.build("qwen3")
caches = KVCacheBuilder.for_model(model, KVCacheConfig(method="plain", options=PlainOptions(plain_bits=2)))
model(tiny.tokens(300), cache=caches)
report = cache_report(caches)
assert {layer.method for layer in report.layers} == {"plain"} and report.ratio > 4, str(report)
try:
    KVCacheBuilder.for_model(model, KVCacheConfig(method="plain", plain_bits=7))
except QuantizerConfigError as error:
    assert "plain_bits=7 cannot be used" in str(error)
else:
    raise AssertionError("7 bits were taken")
"""


def parts() -> dict[str, str]:
    """The blocks of the page that are files or belong into files."""
    return {block.title: block.text for block in blocks(DOCS / "contributing.md") if block.title}


def run(copy: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=copy, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with the method in it."""
    made = tmp_path_factory.mktemp("repository")
    for name in ("veloxquant_mlx", "tests", "tools"):
        shutil.copytree(ROOT / name, made / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", made)
    found = parts()
    method, registry, matrix = (
        "veloxquant_mlx/methods/plain.py",
        "veloxquant_mlx/cache/registry.py",
        "tests/matrix.py",
    )
    assert set(found) == {method, registry, matrix}
    (made / method).write_text(found[method])
    text = (made / registry).read_text()
    assert '    "age_tiered",\n' in text
    line = f"    {found[registry].strip()}\n"
    (made / registry).write_text(text.replace('    "age_tiered",\n', '    "age_tiered",\n' + line))
    with (made / matrix).open("a") as file:
        file.write("\n\n" + found[matrix])
    return made


def test_the_method_of_the_page_serves_a_model_and_passes_property_tests(copy: Path) -> None:
    run(copy, "tools/generate_flat.py")
    run(copy, "-c", "import sys; sys.path.insert(0, '.')\n" + USE)
    files = [f"tests/properties/{name}" for name in PROPERTIES]
    said = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "plain", *files)
    assert " passed" in said and "skipped" not in said, said


def test_the_file_of_the_page_is_clean(copy: Path) -> None:
    run(copy, "-m", "ruff", "check", "veloxquant_mlx/methods/plain.py")
    run(copy, "-m", "ruff", "format", "--check", "veloxquant_mlx/methods/plain.py")
