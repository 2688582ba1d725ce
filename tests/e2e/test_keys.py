"""API keys: every route but those of probes asks for one, and no key is shown anywhere."""

import anthropic
import httpx
import openai
import pytest

from .application import RunningApplication
from .several_models import KEYS

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine]

ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/fleet"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[path for _, path in ROUTES])
def test_route_without_a_valid_key_is_401(
    keyed_application: RunningApplication, method: str, path: str
) -> None:
    url = keyed_application.base_url + path
    wrong = KEYS[0][:-1] + "X"
    bare = httpx.request(method, url)
    guessed = httpx.request(method, url, headers={"Authorization": f"Bearer {wrong}"})
    assert [bare.status_code, guessed.status_code] == [401, 401]
    assert guessed.headers["www-authenticate"] == "Bearer"
    assert wrong not in guessed.text
    kind = guessed.json()["error"]["type"]
    is_anthropic = path.startswith("/v1/messages")
    assert kind == ("authentication_error" if is_anthropic else "invalid_request_error")


def test_probes_need_no_key_and_an_engine_makes_the_cluster_ready(
    keyed_application: RunningApplication,
) -> None:
    assert httpx.get(f"{keyed_application.base_url}/health").status_code == 200
    ready = httpx.get(f"{keyed_application.base_url}/ready")
    assert (ready.status_code, ready.text) == (200, "engines take requests\n")


@pytest.mark.parametrize("key", KEYS, ids=["first", "second"])
def test_every_key_is_accepted_in_either_header(
    keyed_application: RunningApplication, key: str
) -> None:
    url = keyed_application.base_url
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        assert client.completions.create(model="paced", prompt="a", max_tokens=2).choices
    with anthropic.Anthropic(base_url=url, api_key=key) as client:  # sends x-api-key
        messages = [{"role": "user", "content": "a"}]
        assert client.messages.count_tokens(model="paced", messages=messages).input_tokens


def test_wrong_key_is_an_authentication_error_to_the_clients(
    keyed_application: RunningApplication,
) -> None:
    url = keyed_application.base_url
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="sk-wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    with (
        anthropic.Anthropic(base_url=url, api_key="sk-wrong") as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.create(
            model="paced", max_tokens=1, messages=[{"role": "user", "content": "a"}]
        )


def test_no_key_is_shown_in_answers_or_logs(keyed_application: RunningApplication) -> None:
    headers = {"Authorization": f"Bearer {KEYS[1]}"}
    for path in ("/fleet", "/metrics", "/v1/models"):
        answer = httpx.get(keyed_application.base_url + path, headers=headers)
        assert answer.status_code == 200
        assert not any(key in answer.text for key in KEYS)
    for path in keyed_application.log_files():
        text = path.read_bytes()
        assert not any(key.encode() in text for key in KEYS), path.name
