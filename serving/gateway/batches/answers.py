"""What clients see: files, batches and lists as JSON, and the lines of files of answers. Pure.

The forms are OpenAI's, by the types of its Python client 2.x as read on 2026-11-26.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from serving.gateway.batches.lines import UNREADABLE, BatchLine, RefusedLine
from serving.gateway.batches.records import (
    Batch,
    BatchStatus,
    LineAnswer,
    LineFault,
    StoredFile,
    TokenUsage,
)

# A JSON document. Any, because JSON nests arbitrarily.
Json = dict[str, Any]

# The states whose times a batch tells, each in a field of its own.
_TOLD = tuple(status for status in BatchStatus if status is not BatchStatus.VALIDATING)
# Why lines have no answer, by the state in which their batch ends.
_UNANSWERED = {
    BatchStatus.EXPIRED: (
        "batch_expired",
        "The completion window was over before this request was answered.",
    ),
    BatchStatus.CANCELLED: (
        "batch_cancelled",
        "The batch was cancelled before this request was answered.",
    ),
}


@dataclass(frozen=True, slots=True)
class LineReply:
    """What a route answered to a line.

    `retry_after_s` is when to ask again, `None` if it does not say. `is_final`: it says that asking
    again is of no use (`x-should-retry: false`).
    """

    status: int
    body: bytes
    request_id: str
    retry_after_s: float | None = None
    is_final: bool = False


class _Tokens(msgspec.Struct):
    """The usage of an answer, by the names of either kind of route."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: dict[str, Any] | None = None


class _Used(msgspec.Struct):
    usage: _Tokens | None = None


_USED = msgspec.json.Decoder(_Used)
_ANY = msgspec.json.Decoder(msgspec.Raw)


def answer_of(line: BatchLine, reply: LineReply) -> LineAnswer:
    """Returns what is kept of a reply."""
    is_failure = reply.status != 200
    body, usage = _read(reply.body)
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": body}
    if is_failure:
        usage = TokenUsage()
    return LineAnswer(line.number, is_failure, _record(line.custom_id, response, None), usage)


def refusal_of(line: RefusedLine) -> LineAnswer:
    """Returns what is kept of a line that is not asked, because it is no request."""
    record = _record(line.custom_id, None, {"code": line.code, "message": line.message})
    return LineAnswer(line.number, is_failure=True, record=record)


def unanswered(custom_id: str, ended_as: BatchStatus) -> bytes:
    """Returns the line of the error file for a request that its batch has ended without."""
    code, message = _UNANSWERED[ended_as]
    return _record(custom_id, None, {"code": code, "message": message})


def _record(custom_id: str, response: Json | None, error: Json | None) -> bytes:
    record = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(record)


def _read(body: bytes) -> tuple[msgspec.Raw | str, TokenUsage]:
    """Returns a body as JSON without line ends, which stand in no text of it; else as a text.

    It is decoded once where it can be: one of embeddings may have tens of MB.
    """
    try:
        used = _USED.decode(body).usage
    except UNREADABLE:
        used = None
        if not _is_json(body):
            return body.decode(errors="replace"), TokenUsage()
    return msgspec.Raw(body.replace(b"\r", b" ").replace(b"\n", b" ")), _usage_of(used)


def _is_json(body: bytes) -> bool:
    try:
        _ANY.decode(body)
    except UNREADABLE:
        return False
    return True


def _usage_of(used: _Tokens | None) -> TokenUsage:
    if used is None:
        return TokenUsage()
    details = used.prompt_tokens_details or used.input_tokens_details or {}
    cached = details.get("cached_tokens")
    return TokenUsage(
        used.prompt_tokens or used.input_tokens or 0,
        cached if isinstance(cached, int) else 0,
        used.completion_tokens or used.output_tokens or 0,
    )


def file_json(file: StoredFile) -> Json:
    """Returns a file."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at_s),
        "expires_at": _seconds(file.expires_at_s),
        "filename": file.filename,
        "purpose": file.purpose.value,
        "status": "processed",
    }


def batch_json(batch: Batch) -> Json:
    """Returns a batch."""
    errors = [_fault_json(fault) for fault in batch.errors]
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at_s),
        "expires_at": int(batch.expires_at_s),
        **{f"{status}_at": _seconds(batch.entered.get(status)) for status in _TOLD},
        "request_counts": {
            "total": batch.num_total,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        },
        "usage": _usage_json(batch.usage),
        # Ours: OpenAI's clients keep fields that they do not know.
        "cost": {"chip_seconds": batch.cost.chip_ms / 1000, "usd": batch.cost.usd},
        "metadata": dict(batch.metadata) or None,
    }


def list_json(items: Sequence[Json], *, has_more: bool) -> Json:
    """Returns a page of a list."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def _usage_json(usage: TokenUsage) -> Json:
    return {
        "input_tokens": usage.num_input,
        "input_tokens_details": {"cached_tokens": usage.num_cached},
        "output_tokens": usage.num_output,
        # Engines do not tell them apart.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_input + usage.num_output,
    }


def _fault_json(fault: LineFault) -> Json:
    return {
        "code": fault.code,
        "message": fault.message,
        "param": fault.param,
        "line": fault.line,
    }


def _seconds(at_s: float | None) -> int | None:
    return None if at_s is None else int(at_s)
