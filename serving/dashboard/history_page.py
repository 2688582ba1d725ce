"""`GET /fleet/history`: what is asked for, and the answer with its tag.

A reader asks again and again: `since` keeps the answers to what is new, and `If-None-Match` makes
one of nothing new empty.
"""

from collections.abc import Callable, Collection
from urllib.parse import parse_qsl

import msgspec
from starlette.responses import Response

from serving.dashboard.history import STEPS_S, History, Wanted
from serving.dashboard.metric_sampling import ALL_MODELS
from serving.domain.errors import MalformedRequestError, UnknownModelError

# Gateways of one address whose points a reader may have; some more than anybody runs for a page.
MAX_SINCE = 64
_MAX_SLOT = 2**53

# What was read with a key stays in no cache; a reader who sends the tag keeps the points itself.
_HEADERS = {"content-type": "application/json", "cache-control": "no-store"}

# The query's text and the `If-None-Match` header to an answer.
AnswerHistory = Callable[[str, str], Response]


def history_answer(
    history: History, models: Collection[str], query: str, if_none_match: str
) -> Response:
    """The answer to a query; 304 without a body where the reader has all of it.

    Raises:
        MalformedRequestError: the query cannot be understood.
        UnknownModelError: the model is none of `models`.
    """
    wanted = parse_query(query, models)
    tag = f'"{_quotable(history.version(wanted))}"'
    headers = {**_HEADERS, "etag": tag}
    if tag in (each.strip().removeprefix("W/") for each in if_none_match.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(msgspec.json.encode(history.describe(wanted)), headers=headers)


def parse_query(query: str, models: Collection[str]) -> Wanted:
    """What a query asks for: `step` (1 or 10, seconds), `model`, and `since` for each gateway.

    Raises:
        MalformedRequestError: a parameter is unknown, or its value is not allowed.
        UnknownModelError: the model is none of `models`.
    """
    step_s, model = STEPS_S[0], ALL_MODELS
    since: dict[str, int] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "step":
            if value not in map(str, STEPS_S):
                allowed = " or ".join(map(str, STEPS_S))
                raise MalformedRequestError(f"step: {value!r}; allowed: {allowed}", param="step")
            step_s = int(value)
        elif name == "model":
            if value not in models:
                raise UnknownModelError(value, sorted(models))
            model = value
        elif name == "since":
            gateway_id, slot = _since(value)
            since[gateway_id] = slot
        else:
            raise MalformedRequestError(
                f"{name!r} is no parameter; allowed: step, model, since", param=name
            )
    if len(since) > MAX_SINCE:
        raise MalformedRequestError(
            f"since: {len(since)} gateways; allowed: at most {MAX_SINCE}", param="since"
        )
    return Wanted(step_s, model, since)


def _since(value: str) -> tuple[str, int]:
    gateway_id, _, slot = value.rpartition(".")
    if not gateway_id or not (slot.isascii() and slot.isdigit()) or int(slot) > _MAX_SLOT:
        raise MalformedRequestError(
            f"since: {value!r}; allowed: a gateway's id, a dot and the 'until' of its last answer",
            param="since",
        )
    return gateway_id, int(slot)


def _quotable(text: str) -> str:
    """The text as a tag may hold it: a model's name may be of any characters."""
    return text.encode("ascii", "xmlcharrefreplace").decode().replace('"', "&quot;")
