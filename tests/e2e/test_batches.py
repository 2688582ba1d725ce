"""A batch over ten kills of engine hosts, gateways and the directory: every line once.

Kept in a folder, and in a bucket behind GCS's own client.
"""

import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serving.domain.tokens.paced import LETTERS, paced_tokens
from tests.artifacts.object_store.servers import BUCKET, client_variables
from tests.artifacts.object_store.strict_server import strict_server

from .answers import ANSWER_TIMEOUT_S
from .application import Role, RunningApplication, application_args, paced_model

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PATH = "/v1/completions"
NUM_LINES, NUM_TOKENS = 10_000, 4
# In this order, each when another tenth of the lines is answered.
KILLS = (
    *(Role.ENGINE_HOST, Role.GATEWAY, Role.DIRECTORY, Role.ENGINE_HOST, Role.GATEWAY),
    *(Role.ENGINE_HOST, Role.GATEWAY, Role.ENGINE_HOST, Role.DIRECTORY, Role.GATEWAY),
)
# A gateway that starts imports vLLM, on a machine that works meanwhile.
PATIENCE_S = 300.0


def prompt_of(number: int) -> list[int]:
    return list(f"line {number}".encode())


def lines() -> bytes:
    requests = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": PATH,
            "body": {
                "model": "paced",
                "prompt": prompt_of(number),
                "max_tokens": NUM_TOKENS,
                "return_token_ids": True,
            },
        }
        for number in range(NUM_LINES)
    )
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


@contextlib.contextmanager
def place_of(kind: str) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Where batches are kept: what the configuration says, and environment variables.

    The bucket takes one write of an object a second, and loses every fiftieth answer to one.
    """
    if kind == "folder":
        with tempfile.TemporaryDirectory() as folder:
            yield {"folder": str(Path(folder) / "batches"), "lease_s": 5.0}, {}
        return
    with strict_server() as bucket:
        bucket.lose_every, bucket.writes_apart_s = 50, 1.0
        yield {"store": f"{kind}://{BUCKET}/batches", "lease_s": 20.0}, client_variables(bucket.url)


@pytest.fixture(scope="module", params=["folder", "gs"])
def application(request: pytest.FixtureRequest) -> Iterator[RunningApplication]:
    with place_of(request.param) as (batches, environment):
        args = application_args(
            paced_model(2, {"ttft_ms": 10, "tpot_ms": 10}),
            gateway={"replicas": 2},
            batches=batches,
        )
        with RunningApplication(args, environment=environment) as running:
            yield running


@contextlib.contextmanager
def client_of(application: RunningApplication) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(verify=False, timeout=ANSWER_TIMEOUT_S) as http,
        openai.OpenAI(
            base_url=f"{application.base_url}/v1", api_key="none", http_client=http, max_retries=5
        ) as client,
    ):
        yield client


def retrieved(client: openai.OpenAI, batch_id: str) -> Any:
    """The batch, also while no gateway is there to say how far it is."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return client.batches.retrieve(batch_id)
        except (openai.APIConnectionError, openai.InternalServerError):
            assert time.monotonic() < deadline_s, "no gateway answers"
            time.sleep(0.2)


def advanced(client: openai.OpenAI, batch_id: str, num_answered: int) -> Any:
    """The batch, once so many lines are answered or it has ended."""
    deadline_s = time.monotonic() + PATIENCE_S
    last = -1
    while True:
        batch = retrieved(client, batch_id)
        answered = batch.request_counts.completed + batch.request_counts.failed
        if answered >= num_answered or batch.completed_at is not None:
            return batch
        if answered > last:
            last, deadline_s = answered, time.monotonic() + PATIENCE_S
        assert time.monotonic() < deadline_s, f"{answered} of {num_answered} lines, and no more"
        time.sleep(0.2)


def one_of(application: RunningApplication, role: Role) -> Any:
    """A process of the role, once there is one."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (processes := application.processes(role)):
        assert time.monotonic() < deadline_s, f"no {role}"
        time.sleep(0.2)
    return processes[0]


def test_each_of_ten_thousand_lines_is_answered_once_over_ten_kills(
    application: RunningApplication,
) -> None:
    application.loads(2)
    with client_of(application) as client:
        file = client.files.create(file=("in.jsonl", lines()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h")
        for number, role in enumerate(KILLS):
            advanced(client, batch.id, NUM_LINES * (2 * number + 1) // (2 * len(KILLS)))
            one_of(application, role).kill()
        batch = advanced(client, batch.id, NUM_LINES + 1)
        assert batch.status == "completed"
        assert batch.error_file_id is None
        content = client.files.content(batch.output_file_id).text
    answers = [json.loads(line) for line in content.splitlines()]
    ids = Counter(answer["custom_id"] for answer in answers)
    assert ids == Counter(f"line-{number}" for number in range(NUM_LINES))
    wrong = [
        answer["custom_id"]
        for answer in answers
        if answer["response"]["body"]["choices"][0]["token_ids"]
        != paced_tokens(prompt_of(int(answer["custom_id"][5:])), NUM_TOKENS, LETTERS)
    ]
    assert wrong == []
    assert (batch.request_counts.total, batch.request_counts.completed) == (NUM_LINES, NUM_LINES)
    assert batch.usage.output_tokens == NUM_LINES * NUM_TOKENS
