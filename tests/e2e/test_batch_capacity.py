"""A batch whose time runs out gets slices of its own, and gives them back, on a simulated cluster.

Paced engines on real Ray nodes, OpenAI's client, and the policy in Serve's own controller.
"""

import asyncio
import json
from collections.abc import Iterator

import httpx
import openai
import pytest

from autoscaling.replay import replay_log

from .answers import ANSWER_TIMEOUT_S
from .one_class import CLASS, LATER_S, MODEL, OneClass

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PATH = "/v1/completions"
# A slice does about four of them a second within the pace that lines keep to, so one slice would
# take twice as long as there is.
NUM_LINES, NUM_TOKENS, WINDOW = 2400, 20, "5m"


def lines() -> bytes:
    body = {"model": MODEL, "prompt": "Go", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    requests = (
        {"custom_id": f"line-{number}", "method": "POST", "url": PATH, "body": body}
        for number in range(NUM_LINES)
    )
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneClass]:
    folder = tmp_path_factory.mktemp("kept") / "batches"
    batches = {"folder": str(folder), "completion_windows": [WINDOW]}
    with OneClass({}, batches=batches) as running:
        yield running


async def test_batch_without_time_to_wait_gets_slices_and_gives_them_back(
    application: OneClass,
) -> None:
    async with (
        httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S) as http,
        openai.AsyncOpenAI(
            base_url=f"{application.base_url}/v1", api_key="none", http_client=http, max_retries=5
        ) as client,
    ):
        file = await client.files.create(file=("in.jsonl", lines()), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=PATH, completion_window=WINDOW
        )
        fleet = await application.until_ready(2)
        (plan,) = fleet["autoscaling"]["models"]
        assert "slices for them" in plan["arithmetic"]
        async with asyncio.timeout(LATER_S + 60.0):
            while batch.completed_at is None:
                assert batch.status in ("validating", "in_progress", "finalizing"), batch
                await asyncio.sleep(0.5)
                batch = await client.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == NUM_LINES
        assert batch.output_file_id is not None
        answers = (await client.files.content(batch.output_file_id)).text.splitlines()
        assert len({json.loads(each)["custom_id"] for each in answers}) == NUM_LINES
    await application.until_ready(0, most=0)
    targets = [each["targets"][CLASS] for each in application.plans()]
    # What the deadline took, and not all that there is.
    assert 2 <= max(targets) <= 4
    assert replay_log(application.decision_log).differences == ()
