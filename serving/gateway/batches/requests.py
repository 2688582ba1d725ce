"""What clients ask of the batch lane: a new batch, a page of a list, a part of a file. Pure."""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from serving.config.api_keys import KeyRecord
from serving.domain.errors import MalformedRequestError
from serving.gateway.batches.lines import BATCH_ENDPOINTS
from serving.gateway.batches.records import Batch, KeyOfBatch, tenant_of
from serving.gateway.batches.store import Page
from serving.gateway.batches.uploads import lifetime_s

# OpenAI's bounds, by its API reference as read on 2026-11-26.
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_MAX_DIGITS = 9
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


class _Expiry(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Any = None
    seconds: Any = None


class _NewBatch(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: _Expiry | None = None


_NEW_BATCH = msgspec.json.Decoder(_NewBatch)


@dataclass(frozen=True, slots=True)
class ListBounds:
    """How many entries a page has: `usual` if the client does not say, `most` at most."""

    usual: int
    most: int


def new_batch(
    body: bytes, holder: KeyRecord, windows_s: Mapping[str, float], now_s: float
) -> Batch:
    """Returns the batch that a body asks for; `windows_s` are the allowed completion windows.

    Raises:
        MalformedRequestError: it asks for none that there may be.
    """
    try:
        asked = _NEW_BATCH.decode(body)
    except msgspec.ValidationError as error:
        raise MalformedRequestError(f"The batch cannot be made: {error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequestError(f"The body is not valid JSON: {error}") from error
    _check(asked.endpoint, BATCH_ENDPOINTS, "endpoint")
    _check(asked.completion_window, windows_s, "completion_window")
    expiry = asked.output_expires_after
    return Batch(
        batch_id=f"batch_{uuid.uuid4().hex}",
        tenant=tenant_of(holder),
        key=KeyOfBatch.of(holder),
        endpoint=asked.endpoint,
        input_file_id=asked.input_file_id,
        completion_window=asked.completion_window,
        created_at_s=now_s,
        expires_at_s=now_s + windows_s[asked.completion_window],
        metadata=_metadata(asked.metadata or {}),
        output_lifetime_s=None
        if expiry is None
        else lifetime_s(expiry.anchor, expiry.seconds, "output_expires_after"),
    )


def page_of(
    query: str, bounds: ListBounds, others: tuple[str, ...] = ()
) -> tuple[Page, Mapping[str, str]]:
    """Returns the page that a query asks for, and its values of the parameters `others`.

    Raises:
        MalformedRequestError: a parameter is not known, or has a value that is not allowed.
    """
    asked = dict(parse_qsl(query, keep_blank_values=True))
    allowed = ("after", "limit", "order", *others)
    for name in asked:
        _check(name, allowed, "query", "a parameter of another name")
    order = asked.get("order", "desc")
    _check(order, ("asc", "desc"), "order")
    text = asked.get("limit", str(bounds.usual))
    limit = _number(text)
    if limit is None or not 1 <= limit <= bounds.most:
        message = f"limit: {text[:40]!r}; allowed: 1 to {bounds.most}."
        raise MalformedRequestError(message, param="limit")
    page = Page(limit, asked.get("after") or None, order == "asc")
    return page, {name: asked[name] for name in others if name in asked}


def part_of_file(header: str, num_bytes: int) -> tuple[int, int] | None:
    """Returns the beginning and the end of the part that a `Range` asks for; `None` for all.

    A header that asks for something else than one part of a file is ignored, as HTTP has it. An end
    before its beginning means that there is no such part.
    """
    found = _RANGE.fullmatch(header.strip())
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        return max(0, num_bytes - int(last)), num_bytes if int(last) else -1
    begin = int(first)
    end = min(int(last) + 1, num_bytes) if last else num_bytes
    return (begin, end) if begin < num_bytes else (begin, -1)


def _number(text: str) -> int | None:
    """Returns what decimal digits say; `None` of other texts, and of more digits than any bound."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    return int(text) if is_number else None


def _check(value: str, allowed: Any, name: str, what: str = "") -> None:
    if value not in allowed:
        shown = ", ".join(map(str, allowed))
        told = f"{what} {value[:80]!r}".strip()
        raise MalformedRequestError(f"{name}: {told}; allowed: {shown}.", param=name)


def _metadata(given: Mapping[str, str]) -> Mapping[str, str]:
    is_small = len(given) <= _MAX_PAIRS and all(
        len(key) <= _MAX_KEY and len(value) <= _MAX_VALUE for key, value in given.items()
    )
    if not is_small:
        raise MalformedRequestError(
            f"metadata: allowed: at most {_MAX_PAIRS} pairs of a key of at most {_MAX_KEY} "
            f"characters and a text of at most {_MAX_VALUE}.",
            param="metadata",
        )
    return given
