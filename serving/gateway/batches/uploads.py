"""Takes in an uploaded file piece by piece: a form of several parts, of which one is the file.

Owns what the form may hold. The file goes into the store's content as it comes; nothing is held but
the short fields beside it. No I/O of its own.
"""

from dataclasses import dataclass, field

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from serving.domain.errors import MalformedRequestError
from serving.domain.limits import KIB
from serving.gateway.batches.errors import FileTooLargeError
from serving.gateway.batches.records import FilePurpose
from serving.gateway.batches.store import NewContent

_PURPOSE, _FILE = "purpose", "file"
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = (_FILE, _PURPOSE, _ANCHOR, _SECONDS)
_MAX_FIELD_BYTES = 200
# All that is not the file: boundaries, names, fields, and what a client may send before and after.
_MAX_OTHER_BYTES = 64 * KIB
_MAX_FILENAME = 255
# OpenAI's bounds of a file's life, by its API reference as read on 2026-11-26.
MIN_LIFETIME_S, MAX_LIFETIME_S = 3600, 2_592_000


@dataclass(frozen=True, slots=True)
class UploadedForm:
    """What came beside the file. `lifetime_s` is `None` if the client does not say."""

    filename: str
    lifetime_s: int | None


@dataclass(slots=True)
class _Part:
    headers: dict[bytes, bytes] = field(default_factory=dict)
    name: str = ""
    header_name: bytes = b""
    header_value: bytes = b""


class UploadForm:
    """The form of one upload, while it comes."""

    def __init__(self, content_type: str, content: NewContent, max_bytes: int) -> None:
        """Makes a form whose file goes into `content`, by the request's `Content-Type`.

        Raises:
            MalformedRequestError: the type is another one.
        """
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise MalformedRequestError(
                f"content-type: {content_type[:80]!r}; allowed: multipart/form-data with a boundary"
            )
        self._content = content
        self._max_bytes = max_bytes
        self._fields: dict[str, bytes] = {}
        self._filename: str | None = None
        self._part = _Part()
        self._is_whole = False
        self._num_bytes = 0
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._take_header_name,
                    "on_header_value": self._take_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take_data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _unreadable(error) from error

    def feed(self, data: bytes) -> None:
        """Takes the next piece.

        Raises:
            MalformedRequestError: it is no such form, or a field of it is not allowed, or it has
                too much beside its file.
            FileTooLargeError: the file is longer than one may be.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _unreadable(error) from error
        self._num_bytes += len(data)
        if self._num_bytes - self._content.num_bytes > _MAX_OTHER_BYTES:
            raise MalformedRequestError(
                f"The form has more than {_MAX_OTHER_BYTES} bytes beside its file."
            )

    def finish(self) -> UploadedForm:
        """Returns what came.

        Raises:
            MalformedRequestError: something is missing, or has a value that is not allowed.
        """
        if not self._is_whole:
            raise MalformedRequestError("The form ends before its last boundary.")
        if self._filename is None:
            raise MalformedRequestError("file: missing.", param=_FILE)
        purpose = self._text(_PURPOSE)
        if purpose != FilePurpose.BATCH:
            told = "missing" if purpose is None else repr(purpose)
            raise MalformedRequestError(f"purpose: {told}; allowed: batch.", param=_PURPOSE)
        anchor, seconds = self._text(_ANCHOR), self._text(_SECONDS)
        if anchor is None and seconds is None:
            return UploadedForm(self._filename, None)
        return UploadedForm(self._filename, lifetime_s(anchor, seconds))

    def _text(self, name: str) -> str | None:
        value = self._fields.get(name)
        return None if value is None else value.decode(errors="replace")

    def _begin_part(self) -> None:
        self._part = _Part()

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._part.header_name += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.header_value += data[start:end]

    def _end_header(self) -> None:
        part = self._part
        part.headers[part.header_name.lower()] = part.header_value
        part.header_name = part.header_value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._part.headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode(errors="replace")
        if name not in _FIELDS:
            allowed = ", ".join(_FIELDS)
            raise MalformedRequestError(f"{name[:40]!r}: no such field; allowed: {allowed}.")
        if name in self._fields or (name == _FILE and self._filename is not None):
            raise MalformedRequestError(f"{name}: given twice.", param=name)
        self._part.name = name
        if name == _FILE:
            filename = options.get(b"filename", b"").decode(errors="replace")
            self._filename = filename[:_MAX_FILENAME] or "file"
        else:
            self._fields[name] = b""

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        name = self._part.name
        if name == _FILE:
            if self._content.num_bytes + end - start > self._max_bytes:
                raise FileTooLargeError(self._max_bytes)
            self._content.write(data[start:end])
            return
        self._fields[name] += data[start:end]
        if len(self._fields[name]) > _MAX_FIELD_BYTES:
            message = f"{name}: allowed: at most {_MAX_FIELD_BYTES} bytes."
            raise MalformedRequestError(message, param=name)

    def _end(self) -> None:
        self._is_whole = True


def lifetime_s(anchor: object, seconds: object, field: str = "expires_after") -> int:
    """Returns how long a file is to stay.

    Raises:
        MalformedRequestError: it is not said in the way that is allowed.
    """
    if anchor != "created_at":
        raise MalformedRequestError(f"{field}.anchor: allowed: created_at.", param=field)
    try:
        asked = int(str(seconds))
    except ValueError:
        asked = 0
    if not MIN_LIFETIME_S <= asked <= MAX_LIFETIME_S:
        raise MalformedRequestError(
            f"{field}.seconds: {str(seconds)[:40]!r}; allowed: {MIN_LIFETIME_S} to "
            f"{MAX_LIFETIME_S}.",
            param=field,
        )
    return asked


def _unreadable(error: FormParserError) -> MalformedRequestError:
    return MalformedRequestError(f"The form cannot be read: {error}")
