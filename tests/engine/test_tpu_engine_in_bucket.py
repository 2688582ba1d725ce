"""A TPU engine whose model lies in a bucket, settled with the config.json that lies beside it."""

import json

import pytest

from serving.artifacts.object_store.address import open_store
from serving.engine.tpu.settings import resolve_settings_here
from tests.artifacts.object_store.servers import BUCKET, client_variables, store_server

from .test_tpu_engine import config_of, spec

pytestmark = pytest.mark.process

__all__ = ["store_server"]


@pytest.mark.parametrize("kind", ["gs", "s3"])
def test_model_in_a_bucket_is_read_there_and_streamed(
    kind: str, store_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in client_variables(store_server).items():
        monkeypatch.setenv(name, value)
    config = json.dumps(config_of("llama-3.1-8b")).encode()
    open_store(f"{kind}://{BUCKET}/{kind}-m").put("llama/config.json", config)
    resolved = resolve_settings_here(spec("2x2", f"{kind}://{BUCKET}/{kind}-m/llama"))
    assert resolved.engine_args["max_model_len"] == 131072
    assert resolved.engine_args["load_format"] == "runai_streamer"
    assert resolved.programs is not None
    assert str(resolved.programs.parts["revision"]).startswith("objects:")


def test_model_that_is_not_in_its_bucket_leaves_it_undecided(
    store_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in client_variables(store_server).items():
        monkeypatch.setenv(name, value)
    resolved = resolve_settings_here(spec("2x2", f"s3://{BUCKET}/none/llama"))
    assert "max_model_len" not in resolved.engine_args
