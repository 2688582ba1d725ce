"""What is left of a large body once its prompt has been rendered. Pure.

vLLM reads the rest as it reads any body, and finds the prompt rendered (`replay`). Of the prompt is
left what it looks at afterwards: how many prompts there are, and who speaks last.
"""

import json
from collections.abc import Mapping
from typing import Any

from serving.config.api_keys import ModelRoute
from serving.domain.errors import MalformedRequestError
from serving.gateway.edge.fields import num_values
from serving.gateway.forks.bodies.sizes import LARGE_BYTES, MOST_VALUES_LEFT

# A prompt, where vLLM refuses none at all.
_SOME = "x"
_LONGEST_TEXT = 64


def slim_body(path: str, fields: Mapping[str, Any]) -> bytes:
    """Returns a body without its prompt, for a route of `GENERATE_ROUTES`.

    Raises:
        MalformedRequestError: what is not the prompt is too large itself.
    """
    left = dict(fields)
    match path:
        case ModelRoute.CHAT_COMPLETIONS | ModelRoute.MESSAGES:
            left["messages"] = _last_message(left.get("messages"))
            left.pop("documents", None)
            left.pop("system", None)
        case ModelRoute.COMPLETIONS:
            left["prompt"] = _prompts(left.get("prompt"))
            if left.get("prompt_embeds") is not None:
                left["prompt_embeds"] = _prompts(left["prompt_embeds"])
        case ModelRoute.RESPONSES:
            left["input"] = _last_item(left.get("input"))
    body = json.dumps(left).encode()
    _check_left(left, body)
    return body


def check_values(fields: Mapping[str, Any]) -> None:
    """Refuses a body that has to be read again whole, if that takes too long.

    Raises:
        MalformedRequestError: it holds too many objects and lists.
    """
    pending: list[Any] = [fields]
    count = 0
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        else:
            continue
        count += 1
        if count > MOST_VALUES_LEFT:
            raise MalformedRequestError(
                "The body holds too many objects and lists; allowed on this route: "
                f"{MOST_VALUES_LEFT:,}. Divide the request."
            )


def _last_message(messages: Any) -> list[dict[str, Any]]:
    last = messages[-1] if isinstance(messages, list) and messages else {}
    return [{"role": last.get("role", "user"), "content": ""}]


def _prompts(prompt: Any) -> str | list[str] | None:
    if prompt is None:
        return None
    is_one = not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int)
    return _SOME if is_one else [_SOME] * len(prompt)


def _last_item(items: Any) -> Any:
    if not isinstance(items, list) or not items:
        return _SOME
    return [_shortened(items[-1])]


def _shortened(value: Any) -> Any:
    """Returns a value with its long texts cut, and of each list the last item."""
    if isinstance(value, dict):
        return {name: _shortened(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_shortened(value[-1])] if value else []
    is_long = isinstance(value, str) and len(value) > _LONGEST_TEXT
    return value[:_LONGEST_TEXT] if is_long else value


def _check_left(left: Mapping[str, Any], body: bytes) -> None:
    if len(body) <= LARGE_BYTES and num_values(body) <= MOST_VALUES_LEFT:
        return
    largest = max(left, key=lambda name: len(json.dumps(left[name])))
    raise MalformedRequestError(
        f"{largest[:80]}: what is not the prompt has {len(body):,} bytes and at most "
        f"{num_values(body):,} objects and lists, most of them here; allowed: "
        f"{LARGE_BYTES:,} and {MOST_VALUES_LEFT:,}",
        param=largest[:80],
    )
