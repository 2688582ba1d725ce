"""Fingerprints of weights, without reading them."""

import os
from pathlib import Path

import pytest

from serving.artifacts.object_store.address import open_store
from serving.artifacts.weights.revision import config_digest, model_revision
from tests.artifacts.object_store.servers import BUCKET, client_variables, store_server

__all__ = ["store_server"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "model.safetensors").write_bytes(b"0" * 100)
    return folder


def test_folder_is_the_same_wherever_it_lies_and_whenever_it_was_copied(
    folder: Path, tmp_path: Path
) -> None:
    before = model_revision(str(folder), {})
    os.utime(folder / "model.safetensors", (1, 1))
    moved = folder.rename(tmp_path / "elsewhere")
    assert model_revision(str(moved), {}) == before
    assert before is not None
    assert before.startswith("files:")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b'{"hidden_size": 9}'),
        ("model.safetensors", b"0" * 101),
        ("model-00002.safetensors", b"0"),
    ],
)
def test_other_config_sizes_or_files_are_another_revision(
    folder: Path, name: str, content: bytes
) -> None:
    before = model_revision(str(folder), {})
    (folder / name).write_bytes(content)
    assert model_revision(str(folder), {}) != before


def test_id_that_no_cache_has_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_revision("org/of-nobody", {"revision": "main"}) is None


@pytest.mark.process
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_bucket_tells_weights_that_changed_in_place(
    kind: str, store_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in client_variables(store_server).items():
        monkeypatch.setenv(name, value)
    store = open_store(f"{kind}://{BUCKET}/models")
    source = f"{kind}://{BUCKET}/models/{kind}-llama"
    store.put(f"{kind}-llama/model.safetensors", b"first")
    before = model_revision(source, {})
    assert model_revision(f"{source}/", {}) == before
    store.put(f"{kind}-llama/model.safetensors", b"other")
    assert model_revision(source, {}) != before


def test_config_is_the_same_however_it_is_laid_out() -> None:
    assert config_digest({"a": 1, "b": [2]}) == config_digest({"b": [2], "a": 1})
    assert config_digest({"a": 1}) != config_digest({"a": 2})
    assert config_digest(None) is None
