"""Several models in one application: chosen by name, with an adapter, with an embedder."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from .answers import ANSWER_TIMEOUT_S
from .application import RunningApplication
from .several_models import KEYS

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine]

QUESTION = [{"role": "user", "content": "What is Slicewise?"}]


@pytest.fixture
def client(keyed_application: RunningApplication) -> Iterator[OpenAI]:
    url = f"{keyed_application.base_url}/v1"
    with OpenAI(base_url=url, api_key=KEYS[0], max_retries=0, timeout=ANSWER_TIMEOUT_S) as client:
        yield client


def ask(client: OpenAI, model: str, **options: Any) -> str:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=16, **options
    )
    assert answer.model == model
    return answer.choices[0].message.content or ""


def test_models_lists_models_and_adapters(client: OpenAI) -> None:
    models = {model.id: model.model_dump() for model in client.models.list().data}
    assert set(models) == {"paced", "base", "adapted", "embedder"}
    assert models["adapted"]["parent"] == "base"


def test_model_field_chooses_the_model(client: OpenAI) -> None:
    paced, base = ask(client, "paced"), ask(client, "base")
    assert "slicewise" in base.lower()
    assert paced != base


def test_adapter_is_chosen_by_its_name_and_changes_the_words(client: OpenAI) -> None:
    base, adapted = ask(client, "base"), ask(client, "adapted")
    assert adapted != base
    assert ask(client, "adapted") == adapted
    assert ask(client, "base") == base


def test_adapter_and_its_model_share_steps(client: OpenAI) -> None:
    streams = [
        client.completions.create(
            model=model, prompt="A", max_tokens=20, temperature=0, stream=True
        )
        for model in ("base", "adapted")
    ]
    texts = ["".join(chunk.choices[0].text for chunk in stream) for stream in streams]
    assert texts[0] != texts[1]


def test_embeddings_are_unit_vectors_of_the_models_width(client: OpenAI) -> None:
    texts = ["slices and chips", "slices and chips", "something else"]
    answer = client.embeddings.create(model="embedder", input=texts, encoding_format="float")
    first, same, other = (entry.embedding for entry in answer.data)
    assert len(first) == 192
    assert math.hypot(*first) == pytest.approx(1.0, abs=1e-3)
    assert first == pytest.approx(same, abs=1e-4)
    assert math.dist(first, other) > 0.01
    assert answer.usage.prompt_tokens > 0


def test_wrong_kind_of_request_for_a_model_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(model="base", input="x")
    assert caught.value.status_code in {400, 404}
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, "embedder")
    assert caught.value.status_code in {400, 404}


def test_request_without_a_model_is_400_and_names_them(
    keyed_application: RunningApplication,
) -> None:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    url = f"{keyed_application.base_url}/v1/chat/completions"
    answer = httpx.post(url, json={"messages": QUESTION}, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "model"
    assert "base, embedder, paced" in error["message"]
