"""Images at a gateway: each request carries its own to every engine, and who may be asked for them.

The model is a real one of random weights, the engines are scripted.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm.multimodal.cache import (
    MultiModalProcessorOnlyCache,
    engine_receiver_cache_from_config,
    worker_receiver_cache_from_config,
)

from serving.config.application import GatewayConfig
from serving.config.models import ModelConfig
from serving.engine.vllm.engine import engine_config
from serving.gateway.forks.bodies.sizes import LARGE_BYTES
from serving.gateway.model_version import ModelVersion
from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT, RequestContext
from serving.link.messages import TokenRequest
from serving.link.vllm_codec import decode_request, request_decoder
from tests.tiny_vision_model import NUM_IMAGE_TOKENS, image_url, make

from .engines import ScriptedLink

pytestmark = [pytest.mark.imports_vllm, pytest.mark.slow]

DEADLINE_S = 60.0
ARGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make(tmp_path_factory.mktemp("eye") / "model"))


async def version_of(source: str, **engine_args: Any) -> ModelVersion:
    config = {
        "name": "eye",
        "source": source,
        "engine_args": ARGS | engine_args,
        "deployments": [{"compute_class": "local"}],
    }
    return await ModelVersion.build(ModelConfig.model_validate(config), GatewayConfig())


@pytest.fixture
async def version(source: str) -> AsyncIterator[ModelVersion]:
    version = await version_of(source, allowed_media_domains=["images.example.com"])
    yield version
    version.llm.shutdown()


def body(url: str, **part: Any) -> dict[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": url}, **part},
        {"type": "text", "text": "which colours"},
    ]
    return {"model": "eye", "messages": [{"role": "user", "content": parts}], "max_tokens": 8}


async def ask(version: ModelVersion, wanted: dict[str, Any]) -> httpx.Response:
    transport = httpx.ASGITransport(await version.app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.post("/v1/chat/completions", json=wanted)


async def until_running(link: ScriptedLink, num_requests: int = 1) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(link.running) != num_requests:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)


async def finished(link: ScriptedLink, answer: "asyncio.Task[httpx.Response]") -> httpx.Response:
    async with asyncio.timeout(DEADLINE_S):
        while not answer.done():
            link.step()
            await asyncio.sleep(0)
    return answer.result()


def images_of(request: TokenRequest) -> Sequence[Any]:
    """The pixels of each image in a request, as an engine gets them."""
    decoded = decode_request(request, request_decoder())
    assert decoded.mm_features
    return [
        feature.data and feature.data.get_data()["pixel_values"] for feature in decoded.mm_features
    ]


async def test_each_request_carries_its_image_to_whichever_engine(version: ModelVersion) -> None:
    links = [ScriptedLink(version.dispatcher, name) for name in ("e1", "e2")]
    for _ in range(4):
        answer = asyncio.create_task(ask(version, body(image_url(1))))
        async with asyncio.timeout(DEADLINE_S):
            while not any(link.running for link in links):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.001)
        (link,) = [link for link in links if link.running]
        assert (await finished(link, answer)).status_code == 200
        # So that the next one gets the other engine.
        version.dispatcher.lose_engine(link.engine_id, "its turn is over")
        links.remove(link)
        links.append(ScriptedLink(version.dispatcher, f"{link.engine_id}'"))
        (image,) = images_of(link.submitted[-1])
        assert image.shape == (3, 56, 56)
        assert link.submitted[-1].prompt_token_ids.count(3) == NUM_IMAGE_TOKENS
    cache = version.llm.renderer.mm_processor_cache
    assert isinstance(cache, MultiModalProcessorOnlyCache)
    assert cache.make_stats().hits == 3, "the image was processed again"


async def test_image_moves_with_the_request_that_another_engine_continues(
    version: ModelVersion,
) -> None:
    first = ScriptedLink(version.dispatcher, "e1")
    answer = asyncio.create_task(ask(version, body(image_url(1))))
    await until_running(first)
    first.step(3)
    first.end()
    second = ScriptedLink(version.dispatcher, "e2")
    await until_running(second)
    (resumed,) = second.submitted
    assert len(resumed.emitted_token_ids) == 3
    (sent,), (again,) = images_of(first.submitted[0]), images_of(resumed)
    assert sent.equal(again)
    assert (await finished(second, answer)).status_code == 200


async def test_answers_of_one_request_share_the_memory_of_its_image(version: ModelVersion) -> None:
    link = ScriptedLink(version.dispatcher)
    answer = asyncio.create_task(ask(version, body(image_url(1)) | {"n": 3}))
    await until_running(link, 3)
    largest = [max(request.payload, key=len) for request in link.submitted]
    owners = {id(memoryview(part).obj) for part in largest}
    assert len(largest[0]) == 3 * 56 * 56 * 4
    addresses = {memoryview(part).obj.__array_interface__["data"][0] for part in largest}
    assert (len(owners), len(addresses)) == (3, 1)
    assert (await finished(link, answer)).status_code == 200


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:8265/logs", "'127.0.0.1' are not fetched here"),
        ("http://images.example.com.evil.example/a.png", "allowed: URLs of images.example.com"),
        ("http://images.example.com@127.0.0.1/a.png", "'127.0.0.1' are not fetched here"),
        ("file:///etc/passwd", "file: URLs are not read here"),
        ("data:image/png,AAAA", "Only base64 data URLs"),
        ("data:image/png;base64,AAAA", "Failed to load image"),
        ("gopher://images.example.com/", "must be either"),
    ],
)
async def test_image_from_anywhere_else_is_refused(
    version: ModelVersion, url: str, said: str
) -> None:
    answer = await ask(version, body(url))
    assert (answer.status_code, said in answer.text) == (400, True), answer.text


async def test_name_that_a_client_gives_an_image_is_refused(version: ModelVersion) -> None:
    for wanted in (body(image_url(1), uuid="mine"), body("", uuid="mine")):
        answer = await ask(version, wanted)
        assert answer.status_code == 400
        assert "uuid of image: 'mine' cannot be set here" in answer.text


async def test_images_are_named_apart_where_their_content_is_not_read(source: str) -> None:
    """Engines keep encoded images by name, and get requests of several gateways."""
    unread = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    names = set()
    for _ in range(2):
        version = await version_of(source, allowed_media_domains=[], **unread)
        link = ScriptedLink(version.dispatcher)
        answer = asyncio.create_task(ask(version, body(image_url(1))))
        await until_running(link)
        (feature,) = decode_request(link.submitted[0], request_decoder()).mm_features
        names.add(feature.identifier)
        assert (await finished(link, answer)).status_code == 200
        version.llm.shutdown()
    assert len(names) == 2


async def asked_large(version: ModelVersion, wanted: dict[str, Any]) -> httpx.Response:
    """Asks as the edge does for a body that is large: by spaces here."""
    text = json.dumps(wanted)
    app = version.preparing(await version.app())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    token = REQUEST_CONTEXT.set(RequestContext(0.0))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post(
                "/v1/chat/completions",
                content=text[:-1] + " " * LARGE_BYTES + "}",
                headers={"content-type": "application/json"},
                timeout=DEADLINE_S,
            )
    finally:
        REQUEST_CONTEXT.reset(token)


async def test_image_in_a_large_body_is_processed_in_a_fork_to_the_same_pixels(
    version: ModelVersion,
) -> None:
    link = ScriptedLink(version.dispatcher)
    answers = []
    for asking in (ask, asked_large):
        answer = asyncio.create_task(asking(version, body(image_url(1))))
        await until_running(link)
        answers.append(await finished(link, answer))
    first, second = (answer.json()["choices"] for answer in answers)
    assert first == second
    (short,), (large,) = (images_of(request) for request in link.submitted)
    assert short.equal(large)
    short_ids, large_ids = (request.prompt_token_ids for request in link.submitted)
    assert short_ids == large_ids
    await version.wait_closed()


async def test_images_of_two_forks_are_named_apart_where_their_content_is_not_read(
    source: str,
) -> None:
    unread = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    version = await version_of(source, allowed_media_domains=[], **unread)
    link = ScriptedLink(version.dispatcher)
    for number in (1, 2):
        answer = asyncio.create_task(asked_large(version, body(image_url(number))))
        await until_running(link)
        assert (await finished(link, answer)).status_code == 200
    features = [
        decode_request(request, request_decoder()).mm_features for request in link.submitted
    ]
    assert len({feature.identifier for (feature,) in features}) == 2
    await version.wait_closed()


async def test_model_that_may_fetch_anything_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"engine_args\.allowed_media_domains: missing") as caught:
        await version_of(source)
    assert "[] lets clients send data: URLs alone" in str(caught.value)


async def test_model_that_is_told_to_take_text_alone_needs_no_list(source: str) -> None:
    version = await version_of(source, language_model_only=True)
    answer = await ask(version, body("http://127.0.0.1:8265/logs"))
    assert answer.status_code == 400
    version.llm.shutdown()


async def test_folder_that_a_gateway_has_not_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"allowed_local_media_path: no folder at a gateway"):
        await version_of(source, allowed_media_domains=[], allowed_local_media_path="/no/such")


async def test_files_of_the_allowed_folder_are_read_and_no_others(
    source: str, tmp_path: Path
) -> None:
    import base64

    folder = tmp_path / "open"
    folder.mkdir()
    for place in (folder / "a.png", tmp_path / "secret.png"):
        place.write_bytes(base64.b64decode(image_url(1).partition(",")[2]))
    (folder / "way-out.png").symlink_to(tmp_path / "secret.png")
    version = await version_of(
        source, allowed_media_domains=[], allowed_local_media_path=str(folder)
    )
    link = ScriptedLink(version.dispatcher)
    answer = asyncio.create_task(ask(version, body(f"file://{folder}/a.png")))
    await until_running(link)
    assert (await finished(link, answer)).status_code == 200
    for name in ("../secret.png", "way-out.png"):
        refused = await ask(version, body(f"file://{folder}/{name}"))
        assert (refused.status_code, "must be a subpath" in refused.text) == (400, True)
    version.llm.shutdown()


def test_engine_keeps_no_images_that_a_gateway_could_leave_out(source: str) -> None:
    config = engine_config(source, ARGS | {"mm_processor_cache_gb": 4})
    assert engine_receiver_cache_from_config(config) is None
    assert worker_receiver_cache_from_config(config, None) is None


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
