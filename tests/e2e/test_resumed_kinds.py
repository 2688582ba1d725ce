"""Streams of every API are continued elsewhere: stop strings, tool calls, responses, messages."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from .application import Role, RunningApplication, linked_engines
from .conftest import Damage
from .mixed_streams import INVENTORY, MODEL
from .streams import client_of

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine, pytest.mark.long]

LEAVES_IT_DAMAGED = Damage.ENGINES_TO_COME
WHOLE_S = 150.0
# One for each engine and one more: the least loaded engine gets the next.
NUM_STREAMS, NUM_ATTEMPTS = 3, 3
# The part of an answer's events after which the engine dies, at the first attempt.
PART = 3
QUESTION = "List the slices of every zone."
TOOL = {"name": "store", "description": "Stores an inventory.", "parameters": INVENTORY}
ANTHROPIC_TOOL = {"name": "store", "description": "Stores it.", "input_schema": INVENTORY}
MESSAGES = [{"role": "user", "content": QUESTION}]


@dataclass
class Ending:
    """What a client has when a stream is over: everything it can show, without ids and times."""

    words: str = ""
    reasons: list[Any] = field(default_factory=list)
    usage: Any = None
    errors: list[Any] = field(default_factory=list)
    num_events: int = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """One event of any of the APIs."""
        self.num_events += 1
        if "error" in event or event.get("type") == "error":
            self.errors.append(event)
        self.usage = event.get("usage") or event.get("response", {}).get("usage") or self.usage
        delta = event.get("delta", "")
        if isinstance(delta, str):
            self.words += delta
        else:
            self.words += delta.get("text") or delta.get("partial_json") or ""
            self._end(delta.get("stop_reason"), delta.get("stop_sequence"))
        for choice in event.get("choices", ()):
            part = choice.get("delta", choice)
            self.words += part.get("content") or part.get("text") or ""
            for call in part.get("tool_calls") or ():
                self.words += (call["function"].get("name") or "") + (
                    call["function"].get("arguments") or ""
                )
            self._end(choice.get("finish_reason"), choice.get("stop_reason"))
        if "response" in event:
            self._end(event["response"].get("status"), event["response"].get("incomplete_details"))

    def _end(self, reason: Any, detail: Any) -> None:
        if reason is not None:
            self.reasons.append((reason, detail))


@dataclass(frozen=True)
class Kind:
    """A route and a body whose answer is long."""

    path: str
    body: Mapping[str, Any]


def kinds(stop: str) -> dict[str, Kind]:
    """What is asked. `stop` ends a completion late."""
    chat = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 700}
    tool = {"type": "function", "function": TOOL}
    completion = {"model": MODEL, "prompt": "A slice is", "temperature": 0, "max_tokens": 400}
    form = {"type": "json_schema", "name": "inventory", "schema": INVENTORY, "strict": True}
    usage = {"stream_options": {"include_usage": True}}
    return {
        "stop string": Kind(
            "/v1/completions", completion | usage | {"ignore_eos": True, "stop": [stop]}
        ),
        "tool call": Kind(
            "/v1/chat/completions", chat | usage | {"tools": [tool], "tool_choice": "required"}
        ),
        "response": Kind(
            "/v1/responses",
            {"model": MODEL, "input": QUESTION, "temperature": 0, "text": {"format": form}},
        ),
        "message": Kind(
            "/v1/messages",
            chat | {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "store"}},
        ),
    }


async def read(
    base_url: str, kind: Kind, on_event: Callable[[Ending], None] = lambda _: None
) -> Ending:
    ending = Ending()
    body = {**kind.body, "stream": True}
    async with (
        client_of(base_url) as client,
        client.stream("POST", kind.path, json=body) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                ending.take(json.loads(line.removeprefix("data: ")))
                on_event(ending)
    return ending


async def read_through_a_kill(
    application: RunningApplication, kind: Kind, num_events: int
) -> list[Ending]:
    victim = application.processes(Role.ENGINE_HOST)[0]
    begun: set[int] = set()

    def on_event(number: int, ending: Ending) -> None:
        if ending.num_events == num_events and number not in begun:
            begun.add(number)
            if len(begun) == NUM_STREAMS:
                victim.kill()

    return await asyncio.gather(
        *(
            read(
                application.base_url,
                kind,
                lambda ending, number=number: on_event(number, ending),
            )
            for number in range(NUM_STREAMS)
        )
    )


@pytest.fixture(scope="module")
def stop(demo_application: RunningApplication) -> str:
    """A string that the model writes late in its answer, and not before."""
    kind = kinds(stop="never written")["stop string"]
    words = asyncio.run(read(demo_application.base_url, kind)).words
    late = len(words) * 3 // 4
    length = next(n for n in range(4, 200) if words.index(words[late : late + n]) == late)
    return words[late : late + length]


@pytest.mark.parametrize("name", ["stop string", "tool call", "response", "message"])
def test_stream_is_the_same_after_its_engine_died(
    demo_application: RunningApplication, stop: str, name: str
) -> None:
    application, kind = demo_application, kinds(stop)[name]
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, WHOLE_S)
    undisturbed = asyncio.run(read(application.base_url, kind))
    assert (undisturbed.errors, bool(undisturbed.words)) == ([], True)
    if name == "stop string":
        assert undisturbed.reasons == [("stop", stop)]
    moved = 0
    for attempt in range(NUM_ATTEMPTS):
        application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, WHOLE_S)
        before = application.fleet()["models"][0]["resumes"]
        at_event = max(1, undisturbed.num_events // PART // 4**attempt)
        endings = asyncio.run(read_through_a_kill(application, kind, at_event))
        moved = application.fleet()["models"][0]["resumes"] - before
        for ending in endings:
            ending.num_events = undisturbed.num_events
        assert endings == [undisturbed] * NUM_STREAMS
        if moved:
            break
    assert moved, "the answers had ended each time before the engine died"
