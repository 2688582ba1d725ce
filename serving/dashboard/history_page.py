"""The route `GET /fleet/history`: its query, and the answer with its tag.

A reader asks again and again: `since` limits the answer to what is new, and `If-None-Match` makes
an answer without anything new empty.
"""

from collections.abc import Collection
from http import HTTPStatus
from urllib.parse import parse_qsl

import msgspec

from serving.dashboard.history import STEPS_S, History, Wanted
from serving.dashboard.metric_sampling import ALL_MODELS
from serving.domain.dashboard_messages import PageAnswer
from serving.domain.errors import MalformedRequestError, UnknownModelError

_MAX_SLOT = 2**53

# What was read with a key stays in no cache; a reader who sends the tag keeps the points itself.
_HEADERS = {"content-type": "application/json", "cache-control": "no-store"}


def history_answer(history: History, query: str, if_none_match: str) -> PageAnswer:
    """Returns the answer to a query; 304 without a body where the reader has all of it.

    Raises:
        MalformedRequestError: the query cannot be understood.
        UnknownModelError: no gateway has reported the model.
    """
    wanted = parse_query(query, history.models, history.dashboard_id)
    tag = f'"{_quotable(history.version(wanted))}"'
    headers = {**_HEADERS, "etag": tag}
    if tag in (known.strip().removeprefix("W/") for known in if_none_match.split(",")):
        return PageAnswer(HTTPStatus.NOT_MODIFIED, headers=headers)
    return PageAnswer(HTTPStatus.OK, msgspec.json.encode(history.describe(wanted)), headers)


def parse_query(query: str, models: Collection[str], dashboard_id: str) -> Wanted:
    """Parses a query: `step` (1 or 10, seconds), `model`, and `since`.

    A `since` of another dashboard asks for everything, because the one before has ended.

    Raises:
        MalformedRequestError: a parameter is unknown, or its value is not allowed.
        UnknownModelError: the model is none of `models`.
    """
    step_s, model, since = STEPS_S[0], ALL_MODELS, None
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
            asked_id, slot = _since(value)
            since = slot if asked_id == dashboard_id else since
        else:
            raise MalformedRequestError(
                f"{name!r} is no parameter; allowed: step, model, since", param=name
            )
    return Wanted(step_s, model, since)


def _since(value: str) -> tuple[str, int]:
    dashboard_id, _, slot = value.rpartition(".")
    if not dashboard_id or not (slot.isascii() and slot.isdigit()) or int(slot) > _MAX_SLOT:
        raise MalformedRequestError(
            f"since: {value!r}; allowed: the dashboard's id, a dot and the 'until' of its answer",
            param="since",
        )
    return dashboard_id, int(slot)


def _quotable(text: str) -> str:
    """Returns the text as a tag may hold it, because a model's name may have any characters."""
    return text.encode("ascii", "xmlcharrefreplace").decode().replace('"', "&quot;")
