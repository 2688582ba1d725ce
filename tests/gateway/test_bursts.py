"""A burst of requests neither stops the streams that run nor makes its first answers wait.

vLLM's frontend is the real one, behind the real edge; the engine answers in the turn of the loop
after a request has come. What is looked at is the order of events, and no time.
"""

import asyncio
from typing import Any

import pytest

from serving.config.application import GatewayConfig
from serving.gateway.model_version import ModelVersion
from serving.gateway.streams.turns import REQUESTS_PER_TURN, Turns
from serving.link.messages import TokenRequest

from .engines import ScriptedLink
from .test_endpoints import until
from .test_failed_after_admission import OneVersion, Streamed
from .test_forged_resume import CONFIG, DEADLINE_S, MODEL, ROUTES
from .test_http_edge import edge_over

NUM_AT_ONCE = 256


class PromptLink(ScriptedLink):
    """An engine that makes a step in each turn of the loop in which it has requests."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._is_stepping = False
        self.num_steps = 0

    def submit(self, request: TokenRequest) -> None:
        super().submit(request)
        if not self._is_stepping:
            self._is_stepping = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_stepping = bool(self.running)
        if self.running:
            self.num_steps += 1
            self.step()
            asyncio.get_running_loop().call_soon(self._turn)


def request(path: str, num_tokens: int) -> dict[str, Any]:
    most = {"max_tokens": num_tokens}
    return {"model": MODEL, "stream": True, **ROUTES[path], **most}


@pytest.mark.imports_vllm
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_burst_is_let_in_among_the_answers(path: str) -> None:
    version = await ModelVersion.build(CONFIG, GatewayConfig(max_hold_s=0.0))
    link = PromptLink(version.dispatcher)
    edge = edge_over(OneVersion(version))
    async with asyncio.timeout(DEADLINE_S):
        running = Streamed(edge, path, request(path, 1500))
        await until(lambda: len(running.chunks) >= 3)
        written_before = len(running.chunks)
        burst = [Streamed(edge, path, request(path, 1)) for _ in range(NUM_AT_ONCE)]
        num_rendered_at_first_answer = 0
        while len(link.submitted) < 1 + NUM_AT_ONCE:
            await asyncio.sleep(0)
            if not num_rendered_at_first_answer and any(each.chunks for each in burst):
                num_rendered_at_first_answer = len(link.submitted) - 1
        num_written = len(running.chunks) - written_before
        for each in burst:
            await each.task
        assert not running.task.done(), "it was to run all the time"
        running.task.cancel()
        await asyncio.wait([running.task])
    assert all(each.is_whole for each in burst)
    # The first answers came when few were rendered, and the stream went on among them all.
    assert 0 < num_rendered_at_first_answer <= NUM_AT_ONCE / 4
    assert num_written >= NUM_AT_ONCE / REQUESTS_PER_TURN / 2
    version.llm.shutdown()


async def test_few_requests_begin_in_each_turn_in_their_order() -> None:
    turns, begun = Turns(most=3), []

    async def begin(number: int) -> None:
        await turns.wait()
        begun.append(number)

    tasks = [asyncio.create_task(begin(number)) for number in range(10)]
    seen = []
    while len(begun) < 10:
        await asyncio.sleep(0)
        seen.append(len(begun))
    assert begun == [*range(10)]
    assert max(now - before for before, now in zip([0, *seen], seen, strict=False)) <= 3
    await asyncio.gather(*tasks)


async def test_request_whose_client_has_left_takes_nobodys_turn() -> None:
    turns, begun = Turns(most=1), []

    async def begin(number: int) -> None:
        await turns.wait()
        begun.append(number)

    tasks = [asyncio.create_task(begin(number)) for number in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert begun == [0, 2]
