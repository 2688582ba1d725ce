"""API keys: who may ask what, on whose account, and that no key is shown anywhere."""

from typing import Any

import anthropic
import httpx
import openai
import pytest

from .answers import ANSWER_TIMEOUT_S
from .application import RunningApplication
from .several_models import EXPIRED_KEY, KEYS, LIMITED_KEY, PAGE

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine]

SECRETS = (*KEYS, LIMITED_KEY, EXPIRED_KEY)

ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/fleet"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
    ("GET", "/v1/models/paced"),
    ("GET", "/openapi.json"),
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


def get(application: RunningApplication, path: str, key: str) -> httpx.Response:
    return httpx.get(application.base_url + path, headers={"Authorization": f"Bearer {key}"})


def test_limited_key_gets_what_it_is_for_and_nothing_else(
    keyed_application: RunningApplication,
) -> None:
    url = keyed_application.base_url
    with openai.OpenAI(base_url=f"{url}/v1", api_key=LIMITED_KEY) as client:
        assert [model.id for model in client.models.list()] == ["paced"]
        assert client.models.retrieve("paced").id == "paced"
        with pytest.raises(openai.NotFoundError, match="Served here: paced"):
            client.models.retrieve("base")
        assert client.completions.create(model="paced", prompt="a", max_tokens=2).choices
        with pytest.raises(openai.PermissionDeniedError, match="not for the model 'base'"):
            client.completions.create(model="base", prompt="a", max_tokens=2)
        messages: Any = [{"role": "user", "content": "a"}]
        with pytest.raises(openai.PermissionDeniedError, match="not for the route"):
            client.chat.completions.create(model="paced", messages=messages)
    with (
        anthropic.Anthropic(base_url=url, api_key=LIMITED_KEY) as client,
        pytest.raises(anthropic.PermissionDeniedError, match="not for the route"),
    ):
        client.messages.create(model="paced", max_tokens=1, messages=messages)
    for path, scope in (("/metrics", "metrics"), ("/fleet", "fleet")):
        answer = get(keyed_application, path, LIMITED_KEY)
        assert answer.status_code == 403
        assert f"not for the scope '{scope}'" in answer.json()["error"]["message"]


def test_key_that_has_ended_says_so(keyed_application: RunningApplication) -> None:
    answer = get(keyed_application, "/v1/models", EXPIRED_KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "expired_api_key")
    assert "2026-01-01T00:00:00Z" in answer.json()["error"]["message"]


def test_prompt_of_one_tenant_is_in_no_cache_of_another(
    keyed_application: RunningApplication,
) -> None:
    prompt = [70 + number % 50 for number in range(400)]

    def cached_tokens(key: str, **fields: Any) -> int:
        body = {"model": "base", "prompt": prompt, "max_tokens": 1, **fields}
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{keyed_application.base_url}/v1/completions"
        usage = httpx.post(url, json=body, headers=headers, timeout=ANSWER_TIMEOUT_S).json()[
            "usage"
        ]
        return int((usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"] or 0)

    assert cached_tokens(KEYS[0]) == 0
    hit = cached_tokens(KEYS[0])
    assert hit > 0
    assert cached_tokens(KEYS[1]) == 0  # the same prompt, first asked by another tenant
    assert cached_tokens(KEYS[1]) == hit
    assert cached_tokens(KEYS[0], cache_salt="x") == 0
    assert cached_tokens(KEYS[1], cache_salt="x") == 0
    assert cached_tokens(KEYS[0], cache_salt="x") == hit


def test_methods_pages_and_description_are_answered_through_the_proxy(
    keyed_application: RunningApplication,
) -> None:
    url = keyed_application.base_url
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    wrong = httpx.get(f"{url}/v1/chat/completions", headers=headers)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(f"{url}/v1/chat/completions", headers=asked)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (204, PAGE)
    refused = httpx.post(f"{url}/v1/chat/completions", json={}, headers={"Origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    described = httpx.get(f"{url}/openapi.json", headers=headers).json()
    schemas = described["components"]["schemas"]
    assert schemas["ChatCompletionRequest"]["properties"]["model"]["enum"] == [
        "adapted", "base", "paced"
    ]  # fmt: skip
    asked = {"model": "paced", "prompt": "a", "max_tokens": 1}
    one = httpx.post(f"{url}/v1/completions", headers=headers, json=asked, timeout=ANSWER_TIMEOUT_S)
    for path, operations in described["paths"].items():
        (method,) = operations
        asked_path = path.replace("{model}", "paced")
        asked_path = asked_path.replace("{request_id}", one.headers["x-request-id"])
        answer = httpx.request(
            method, url + asked_path, headers=headers, json={}, timeout=ANSWER_TIMEOUT_S
        )
        assert answer.status_code not in (404, 405), path


def test_no_key_is_shown_in_answers_or_logs(keyed_application: RunningApplication) -> None:
    headers = {"Authorization": f"Bearer {KEYS[1]}"}
    for path in ("/fleet", "/metrics", "/v1/models"):
        answer = httpx.get(keyed_application.base_url + path, headers=headers)
        assert answer.status_code == 200
        assert not any(key in answer.text for key in SECRETS)
    for path in keyed_application.log_files():
        text = path.read_bytes()
        assert not any(key.encode() in text for key in SECRETS), path.name
