"""Reads the lines of a batch's file, and says which cannot be requests. Pure, but for the reading.

Owns the form of a line. Does not own what a request may ask for: its route judges that when the
line is answered, as it does for a request of a client. Nor where a line is read: a long one in a
fork (`running/long_lines`), because what decodes it would hold a gateway up.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from serving.config.api_keys import ModelRoute
from serving.domain.limits import KIB
from serving.gateway.batches.records import LineFault

# The routes whose requests a batch may hold.
BATCH_ENDPOINTS = (
    ModelRoute.CHAT_COMPLETIONS,
    ModelRoute.COMPLETIONS,
    ModelRoute.RESPONSES,
    ModelRoute.EMBEDDINGS,
)
MAX_CUSTOM_ID = 512
# Characters of the name of a model; ours have 200 at most. Names are in the batch's record, which
# is read and written each second or two.
MAX_MODEL_NAME = 256
# Of a file with more faults than these the first ones are told.
MAX_FAULTS = 100
# Levels of a line, itself included: more than schemas of tools have. Python's readers of JSON give
# up at some 900, or sooner where their caller is deep in its stack.
MAX_NESTING = 128
_MODELS = 100
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class LineLimits:
    """The bounds of a batch's file: lines, and bytes of one line."""

    max_lines: int
    max_line_bytes: int


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch. `number` is its line in the file, from 1; `body` is JSON.

    `model` is what it names, if it names one.
    """

    number: int
    custom_id: str
    body: bytes
    model: str | None = None


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A line that is no request now, though it was when its file was checked.

    `number` counts from 1; `code`, `message` and `param` are what its `LineError` says.
    """

    number: int
    custom_id: str
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedLines:
    """What a file holds: `num_lines` requests, or why it holds none that can be asked.

    `by_model` counts the lines by the models that they name, of the first hundred models.
    """

    num_lines: int
    faults: tuple[LineFault, ...]
    by_model: Mapping[str, int] = field(default_factory=dict)


# Returns what a line is: its number, its bytes, the endpoint of the batch, and the bounds of then.
ReadLine = Callable[[int, bytes, str, LineLimits], BatchLine | RefusedLine]


class LineError(Exception):
    """Reports a line that cannot be a request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code, message, param)
        self.code, self.message, self.param = code, message, param


class _Named(msgspec.Struct):
    """What is looked at in a line that is not to be a request."""

    custom_id: str


class _Asked(msgspec.Struct):
    """What is looked at in a body before it is a request."""

    stream: Any = None
    model: Any = None


# What a decoder raises of a text that a client wrote.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_LINE = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)
_BODY = msgspec.json.Decoder(_Asked)
_NAMED = msgspec.json.Decoder(_Named)
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_FIRST_FIELD_IS_ID = re.compile(rb'\s*\{\s*"custom_id"\s*:\s*(' + _STRING + rb")", re.DOTALL)
# Where such a field ends, whatever its characters are written as: 12 bytes at most for one.
_FIRST_FIELD_BYTES = 8 * KIB
# What of a line is looked at in one call, which holds up all threads.
_PIECE_BYTES = 256 * KIB
_BRACES_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def numbered(content: BinaryIO, limits: LineLimits) -> Iterator[tuple[int, bytes]]:
    """Yields the lines with their numbers; empty ones are left out, long ones are cut."""
    return ((number, line) for number, _, line in placed(content, limits))


def placed(content: BinaryIO, limits: LineLimits) -> Iterator[tuple[int, int, bytes]]:
    """Yields what `numbered` does, and before each line the byte at which it begins."""
    number, begin = 0, content.tell()
    while line := content.readline(limits.max_line_bytes + 2):
        number += 1
        bare = _bare(number, line)
        if not _is_blank(bare):
            yield number, begin, bare
        while not line.endswith(b"\n") and (rest := content.readline(limits.max_line_bytes + 2)):
            line = rest
        begin = content.tell()


def line_at(content: BinaryIO, number: int, begin: int, limits: LineLimits) -> bytes:
    """Returns a line that `placed` has found."""
    content.seek(begin)
    return _bare(number, content.readline(limits.max_line_bytes + 2))


def _bare(number: int, line: bytes) -> bytes:
    if number == 1:
        line = line.removeprefix(_BYTE_ORDER_MARK)
    is_whole = line.endswith(b"\n")
    return line.removesuffix(b"\n").removesuffix(b"\r") if is_whole else line


def parse_line(number: int, line: bytes, endpoint: str, limits: LineLimits) -> BatchLine:
    """Returns the request of a line.

    Raises:
        LineError: it holds none for this endpoint.
    """
    if len(line) > limits.max_line_bytes:
        message = f"The line is longer than the {limits.max_line_bytes} bytes allowed."
        raise LineError("line_too_long", message)
    fields = _fields(line)
    custom_id = _text(fields, "custom_id")
    if not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id: {len(custom_id)} characters; allowed: 1 to {MAX_CUSTOM_ID}."
        raise LineError("invalid_custom_id", message, "custom_id")
    if (method := _text(fields, "method")) != "POST":
        raise LineError("invalid_method", f"method: {method[:40]!r}; allowed: POST.", "method")
    if (url := _text(fields, "url")) != endpoint:
        message = f"url: {url[:80]!r}; allowed: {endpoint}, the endpoint of the batch."
        raise LineError("mismatched_url", message, "url")
    body, model = _body(fields)
    return BatchLine(number, custom_id, body, model)


def line_or_refusal(
    number: int, line: bytes, endpoint: str, limits: LineLimits
) -> BatchLine | RefusedLine:
    """Returns the request of a line of a file that has been checked.

    The limits of then may have been wider, and the rules others: of an earlier build.
    """
    try:
        return parse_line(number, line, endpoint, limits)
    except LineError as error:
        custom_id = custom_id_of(number, line)
        return RefusedLine(number, custom_id, error.code, error.message, error.param)


def custom_id_of(number: int, line: bytes) -> str:
    """Returns the `custom_id` of a line, whatever else is in it; "line 7" of one that has none.

    A line that was cut has it if it begins with it. One that is longer than allowed is none. Raises
    nothing.
    """
    with contextlib.suppress(*UNREADABLE):
        return _id_or_number(_NAMED.decode(line).custom_id, number)
    return first_custom_id_of(number, line)


def first_custom_id_of(number: int, line: bytes) -> str:
    """Returns the `custom_id` with which a line begins; "line 7" of one that does not.

    Looks at its first 8 KiB.
    """
    found = _FIRST_FIELD_IS_ID.match(line, 0, _FIRST_FIELD_BYTES)
    with contextlib.suppress(*UNREADABLE):
        if found is not None:
            return _id_or_number(_TEXT.decode(found[1]), number)
    return f"line {number}"


def _id_or_number(custom_id: str, number: int) -> str:
    return custom_id if len(custom_id) <= MAX_CUSTOM_ID else f"line {number}"


def check_lines(
    content: BinaryIO, endpoint: str, limits: LineLimits, read: ReadLine = line_or_refusal
) -> CheckedLines:
    """Reads a whole file. Holds the ids of its lines, and of its lines one at a time."""
    faults: list[LineFault] = []
    seen: dict[str, int] = {}
    by_model: Counter[str] = Counter()
    num_lines = 0
    for number, line in numbered(content, limits):
        num_lines += 1
        if num_lines > limits.max_lines:
            message = f"The file has more than {limits.max_lines} lines. Divide it."
            return CheckedLines(num_lines, (LineFault("too_many_lines", message),))
        try:
            parsed = read(number, line, endpoint, limits)
            if isinstance(parsed, RefusedLine):
                raise LineError(parsed.code, parsed.message, parsed.param)
            if parsed.model is not None and (parsed.model in by_model or len(by_model) < _MODELS):
                by_model[parsed.model] += 1
            first = seen.setdefault(parsed.custom_id, number)
            if first != number:
                message = f"custom_id: it is that of line {first} too; allowed: each once."
                raise LineError("duplicate_custom_id", message, "custom_id")
        except LineError as error:
            faults.append(LineFault(error.code, error.message, number, error.param))
            if len(faults) >= MAX_FAULTS:
                break
    if not num_lines:
        faults.append(LineFault("empty_file", "The file has no line."))
    return CheckedLines(num_lines, tuple(faults), dict(by_model))


def _fields(line: bytes) -> dict[str, msgspec.Raw]:
    try:
        # The decoder checks only the texts that it returns.
        line.decode()
    except UnicodeDecodeError as error:
        raise LineError("invalid_json_line", "The line is not UTF-8.") from error
    message = f"The line has more than the {MAX_NESTING} levels of objects and arrays allowed."
    try:
        fields = _LINE.decode(line)
    except RecursionError as error:
        raise LineError("nested_too_deeply", message) from error
    except UNREADABLE as error:
        raise LineError("invalid_json_line", "The line is not a JSON object.") from error
    if _is_deep(line):
        raise LineError("nested_too_deeply", message)
    return fields


def _is_blank(line: bytes) -> bool:
    pieces = range(0, len(line), _PIECE_BYTES)
    return all(line[at : at + _PIECE_BYTES].isspace() for at in pieces)


def _is_deep(line: bytes) -> bool:
    """Returns whether a JSON text has more levels than are allowed."""
    if line.count(b"[") + line.count(b"{") <= MAX_NESTING:
        return False
    # Backslashes are in strings alone. Without those that stand for themselves and for quotes,
    # every quote begins a string or ends one.
    plain = line.replace(rb"\\", b"").replace(rb"\"", b"")
    beside_strings = b"".join(plain.split(b'"')[::2])
    brackets = beside_strings.translate(_BRACES_AS_BRACKETS, _NO_BRACKETS)
    for _ in range(MAX_NESTING):  # each turn takes the innermost level away
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _text(fields: dict[str, msgspec.Raw], name: str) -> str:
    if name not in fields:
        raise LineError("missing_required_parameter", f"{name}: missing.", name)
    try:
        return _TEXT.decode(fields[name])
    except UNREADABLE as error:
        raise LineError("invalid_type", f"{name}: allowed: a string.", name) from error


def _body(fields: dict[str, msgspec.Raw]) -> tuple[bytes, str | None]:
    if "body" not in fields:
        raise LineError("missing_required_parameter", "body: missing.", "body")
    body = bytes(fields["body"])
    try:
        asked = _BODY.decode(body)
    except UNREADABLE as error:
        raise LineError("invalid_type", "body: allowed: an object.", "body") from error
    if asked.stream:
        message = "body.stream: an answer in a file is no stream; allowed: false, or left out."
        raise LineError("stream_not_allowed", message, "body.stream")
    model = asked.model if isinstance(asked.model, str) else None
    if model is not None and len(model) > MAX_MODEL_NAME:
        message = (
            f"body.model: {len(model)} characters, which begin {model[:40]!r}; "
            f"allowed: {MAX_MODEL_NAME} at most."
        )
        raise LineError("model_name_too_long", message, "body.model")
    return body, model
