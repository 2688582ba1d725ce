"""Where a request's prompt is rendered: on the event loop, in vLLM's thread, or in a fork before.

Decides that alone; what a prompt becomes is the business of vLLM's renderer. A short request is
rendered by the renderer's own synchronous methods, on the loop: the way to the thread and back, and
the tasks around it, cost more than its tokens. A longer one goes to the thread, so that the loop
sends what others wait for. What a fork has rendered (`forks/bodies`) is given back as it came.

Works on vLLM's objects as they come.
"""

import functools
from collections.abc import Sequence
from typing import Any

from serving.gateway.streams.known.forms import LESSON, MOST_MESSAGES
from serving.gateway.streams.turns import in_own_turn
from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT

# A short body may have many of them, and each takes some 100 us.
_MOST_PROMPTS = 4
_OF_TEXT = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


def fit_rendering(renderer: Any) -> None:
    """Has a renderer work on the loop for short requests, and replay what a fork has rendered.

    Its tokenizer is not changed afterwards.
    """
    render_chat, render_prompts = renderer.render_chat_async, renderer.render_cmpl_async

    async def render_chat_async(conversations: Any, *args: Any, **kwargs: Any) -> Any:
        known = _replayed()
        if known is not None:
            return known
        try:
            if _is_short() and _are_texts(conversations):
                if (lesson := LESSON.get()) is not None:
                    lesson.render = (args, kwargs)
                return await in_own_turn(renderer.render_chat, conversations, *args, **kwargs)
            return await render_chat(conversations, *args, **kwargs)
        except AssertionError as error:
            # So vLLM says of a part of a message that it has no type, which is the client's fault.
            raise ValueError("a part of a message has no form that is known: no type") from error

    async def render_cmpl_async(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        known = _replayed()
        if known is not None:
            return known[1]
        if _is_short() and _are_prompts(prompts):
            return await in_own_turn(renderer.render_cmpl, prompts, *args, **kwargs)
        return await render_prompts(prompts, *args, **kwargs)

    # Asked for by each request; the tokenizer looks it up anew, in a pool of copies.
    renderer.get_eos_token_id = functools.cache(renderer.get_eos_token_id)
    renderer.render_chat_async = render_chat_async
    renderer.render_cmpl_async = render_cmpl_async


def _replayed() -> tuple[Any, Any] | None:
    """Returns the next result of a fork for the present request; `None` if there was no fork."""
    context = REQUEST_CONTEXT.get()
    renders = None if context is None else context.renders
    # An `IndexError` means that vLLM renders it once more: what is left of it is no prompt.
    return None if renders is None else renders.popleft()


def _is_short() -> bool:
    context = REQUEST_CONTEXT.get()
    return context is not None and context.is_short


def _are_texts(conversations: Sequence[Sequence[Any]]) -> bool:
    """Returns whether conversations are few and text: media may have to be fetched."""
    messages = [message for conversation in conversations for message in conversation]
    return len(messages) <= MOST_MESSAGES and all(
        isinstance(message, dict) and isinstance(message.get("content"), str | None)
        for message in messages
    )


def _are_prompts(prompts: Sequence[Any]) -> bool:
    """Returns whether prompts are few, text or tokens, and nothing beside them."""
    return len(prompts) <= _MOST_PROMPTS and all(
        isinstance(prompt, dict) and prompt.keys() <= _OF_TEXT for prompt in prompts
    )
