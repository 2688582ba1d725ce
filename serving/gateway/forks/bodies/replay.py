"""Results of vLLM's renderer: noted in a fork, and given back by the gateway's own renderer.

A result is a list of conversations, of which the last message is kept, and the inputs of an engine.
They are msgpack, or a pickle where they hold tensors: who unpickles one has forked who wrote it.
Works on vLLM's objects as they come.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import msgspec

_PLAIN, _PICKLED = b"m", b"p"


def note_renders(renderer: Any, noted: list[Any]) -> None:
    """Has a renderer add each of its results to `noted`."""
    render_chat, render_prompts = renderer.render_chat_async, renderer.render_cmpl_async

    async def render_chat_async(*args: Any, **kwargs: Any) -> Any:
        conversations, inputs = await render_chat(*args, **kwargs)
        noted.append(([conversation[-1:] for conversation in conversations], inputs))
        return conversations, inputs

    async def render_cmpl_async(*args: Any, **kwargs: Any) -> Any:
        inputs = await render_prompts(*args, **kwargs)
        noted.append((None, inputs))
        return inputs

    renderer.render_chat_async, renderer.render_cmpl_async = render_chat_async, render_cmpl_async


def encoded(render: tuple[Sequence[Any] | None, Sequence[Any]]) -> bytes:
    """Returns a result of `note_renders` as bytes."""
    try:
        return _PLAIN + msgspec.msgpack.encode(render)
    except (TypeError, OverflowError):
        return _PICKLED + pickle.dumps(render)


def decoded(render: bytes) -> tuple[Any, Any]:
    """Returns what `encoded` made bytes of."""
    of_form = memoryview(render)[1:]
    if render[:1] == _PLAIN:
        conversations, inputs = msgspec.msgpack.decode(of_form)
    else:
        conversations, inputs = pickle.loads(of_form)
    return conversations, inputs
