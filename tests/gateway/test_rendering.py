"""Which requests are rendered on the loop, and which in vLLM's thread. The renderer is scripted."""

from collections import deque
from typing import Any

import pytest

from serving.gateway.edge.rendering import fit_rendering
from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT, RequestContext

TEXT = {"role": "user", "content": "What is a slice?"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
CALL = {"role": "assistant", "content": None, "tool_calls": []}


class Renderer:
    """Says where it was asked to render. Has the methods of vLLM's that are used here."""

    def __init__(self) -> None:
        self.num_looked_up = 0

    def render_chat(self, _conversations: Any, *_: Any, **__: Any) -> Any:
        return "loop", "loop"

    async def render_chat_async(self, _conversations: Any, *_: Any, **__: Any) -> Any:
        return "thread", "thread"

    def render_cmpl(self, _prompts: Any, *_: Any, **__: Any) -> Any:
        return "loop"

    async def render_cmpl_async(self, _prompts: Any, *_: Any, **__: Any) -> Any:
        return "thread"

    def get_eos_token_id(self) -> int:
        self.num_looked_up += 1
        return 2


def fitted(**context: Any) -> Renderer:
    renderer = Renderer()
    fit_rendering(renderer)
    REQUEST_CONTEXT.set(RequestContext(0.0, **context))
    return renderer


@pytest.mark.parametrize(
    ("messages", "is_short", "where"),
    [
        ([TEXT], True, "loop"),
        ([TEXT, CALL, TEXT], True, "loop"),
        ([TEXT] * 16, True, "loop"),
        ([TEXT] * 17, True, "thread"),
        ([TEXT, IMAGE], True, "thread"),
        ([TEXT], False, "thread"),
    ],
)
async def test_few_short_texts_are_rendered_on_the_loop(
    messages: list[Any], is_short: bool, where: str
) -> None:
    renderer = fitted(is_short=is_short)
    assert await renderer.render_chat_async([messages], None) == (where, where)


@pytest.mark.parametrize(
    ("prompts", "is_short", "where"),
    [
        ([{"prompt": "A slice is"}], True, "loop"),
        ([{"prompt_token_ids": [5, 6]}], True, "loop"),
        ([{"prompt": "A"}] * 4, True, "loop"),
        ([{"prompt": "A"}] * 5, True, "thread"),
        ([{"prompt": "A", "multi_modal_data": {}}], True, "thread"),
        ([b"embeddings"], True, "thread"),
        ([{"prompt": "A slice is"}], False, "thread"),
    ],
)
async def test_few_short_prompts_are_rendered_on_the_loop(
    prompts: list[Any], is_short: bool, where: str
) -> None:
    renderer = fitted(is_short=is_short)
    assert await renderer.render_cmpl_async(prompts, None) == where


async def test_what_no_request_asks_for_is_rendered_in_the_thread() -> None:
    renderer = fitted()
    REQUEST_CONTEXT.set(None)
    assert await renderer.render_chat_async([[TEXT]], None) == ("thread", "thread")


async def test_what_a_fork_has_rendered_is_given_back() -> None:
    renderer = fitted(is_short=True, renders=deque([("chat", "inputs"), (None, "prompts")]))
    assert await renderer.render_chat_async([[TEXT]], None) == ("chat", "inputs")
    assert await renderer.render_cmpl_async([{"prompt": "A"}], None) == "prompts"


def test_end_token_is_looked_up_once() -> None:
    renderer = fitted()
    assert [renderer.get_eos_token_id() for _ in range(3)] == [2, 2, 2]
    assert renderer.num_looked_up == 1
