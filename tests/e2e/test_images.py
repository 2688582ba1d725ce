"""Images with two engines behind two gateways: whoever answers, and whoever goes on, has seen them.

With vLLM's mirrored cache an image that an engine got once would come as a hash, from any gateway
and to any engine.
"""

import asyncio
import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest

from tests.tiny_vision_model import image_url, make

from .application import (
    Role,
    RunningApplication,
    application_args,
    demo_model,
    linked_engines,
)
from .streams import Answer, Request, stream_all

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine, pytest.mark.long]

MODEL = "eye"
NUM_TOKENS = 400
# Which image each stream sends: most the same, at both gateways.
IMAGES = [1, 1, 1, 2, 1, 2, 1, 1]
NUM_EARLY_TOKENS = 20
REPLACEMENT_S = 150.0


def asks(url: str) -> Request:
    """One long answer about an image."""
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "which colours has the image"},
    ]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return Request("/v1/chat/completions", body)


STREAMS = [asks(image_url(image)) for image in IMAGES]


class Pictures(BaseHTTPRequestHandler):
    """Has image 1 at /image.png, and sends whoever asks for anything else there."""

    def do_GET(self) -> None:
        is_there = self.path == "/image.png"
        self.send_response(200 if is_there else 302)
        if not is_there:
            self.send_header("location", "/image.png")
        self.end_headers()
        if is_there:
            self.wfile.write(base64.b64decode(image_url(1).partition(",")[2]))

    def log_message(self, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def pictures() -> Iterator[str]:
    """Where a host that clients may name has its pictures."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApplication]:
    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.1,
        "allowed_media_domains": ["127.0.0.1"],
    }
    model = {
        "name": MODEL,
        "source": str(make(tmp_path_factory.mktemp("eye") / "model")),
        "engine_args": arguments,
        "engine_env": demo_model()["engine_env"],
        "deployments": [{"compute_class": "local", "replicas": 2}],
    }
    with RunningApplication(application_args(model, gateway={"replicas": 2})) as running:
        running.loads(2)
        yield running


@pytest.fixture(scope="module")
def undisturbed(application: RunningApplication) -> list[Answer]:
    """What the streams answer when nothing happens."""
    return asyncio.run(stream_all(application.base_url, STREAMS))


def num_resumes(application: RunningApplication) -> int:
    """How often a request of either gateway has been resumed."""
    found = application.at_each_gateway(2, lambda fleet: int(fleet["models"][0]["resumes"]))
    return sum(found.values())


def test_an_image_has_one_answer_whoever_gives_it(undisturbed: list[Answer]) -> None:
    assert [answer.error for answer in undisturbed] == [None] * len(STREAMS)
    first = {image: undisturbed[IMAGES.index(image)] for image in IMAGES}
    assert first[1].num_tokens == first[2].num_tokens == NUM_TOKENS
    assert not first[1].same_as(first[2]), "the model does not see"
    for image, answer in zip(IMAGES, undisturbed, strict=True):
        assert answer.same_as(first[image])


def test_an_image_is_fetched_from_a_named_host_and_not_from_where_that_sends_on(
    application: RunningApplication, undisturbed: list[Answer], pictures: str
) -> None:
    wanted = [asks(f"{pictures}/image.png"), asks(f"{pictures}/elsewhere")]
    fetched, sent_on = asyncio.run(stream_all(application.base_url, wanted))
    assert fetched.same_as(undisturbed[IMAGES.index(1)])
    assert sent_on.error is not None
    assert sent_on.error.startswith("4"), sent_on.error


def test_an_engine_that_never_saw_the_image_goes_on_token_for_token(
    application: RunningApplication, undisturbed: list[Answer]
) -> None:
    # On a busy machine one engine may have had all of them: then it is the next.
    for victim in application.processes(Role.ENGINE_HOST):
        if num_moved_at_its_end(application, victim, undisturbed):
            return
        application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, REPLACEMENT_S)
    raise AssertionError("nothing was in flight on the engines that died")


def num_moved_at_its_end(
    application: RunningApplication, victim: psutil.Process, undisturbed: list[Answer]
) -> int:
    """Kills an engine amid streams, none of which may differ; how many it had."""
    carried: set[str] = set()

    def have_both_carried(fleet: dict[str, Any]) -> bool:
        if fleet["models"][0]["in_flight"]:
            carried.add(fleet["gateway"]["id"])
        return len(carried) == 2

    async def run() -> list[Answer]:
        first_is_early = asyncio.Event()

        # Not when all are early: the streams of one engine may be over by then.
        def on_chunk(_: int, answer: Answer) -> None:
            if answer.num_tokens >= NUM_EARLY_TOKENS:
                first_is_early.set()

        streaming = asyncio.create_task(stream_all(application.base_url, STREAMS, on_chunk))
        watching = asyncio.create_task(
            asyncio.to_thread(application.wait_fleet, have_both_carried, 60.0)
        )
        async with asyncio.timeout(60):
            await first_is_early.wait()
        victim.kill()
        answers = await streaming
        await watching
        return answers

    resumes = num_resumes(application)
    answers = asyncio.run(run())
    assert [answer.error for answer in answers] == [None] * len(STREAMS)
    assert all(now.same_as(then) for now, then in zip(answers, undisturbed, strict=True))
    return num_resumes(application) - resumes


def test_an_engine_that_came_later_gets_the_whole_image(
    application: RunningApplication, undisturbed: list[Answer]
) -> None:
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, REPLACEMENT_S)
    answers = asyncio.run(stream_all(application.base_url, STREAMS))
    assert all(now.same_as(then) for now, then in zip(answers, undisturbed, strict=True))
