"""The reference of errors has every refusal that a client can get, with its status."""

import re
from collections.abc import Iterator
from pathlib import Path

from serving.domain.errors import CannotResumeError, ForbiddenError, RequestError
from serving.gateway.batches import errors as batch_errors

PAGE = Path(__file__).parents[2] / "docs/reference/errors.md"


def listed() -> dict[str, set[str]]:
    """The statuses of each code on the page."""
    found: dict[str, set[str]] = {}
    for status, codes in re.findall(r"^\| ([\d or]+) \| ([^|]+) \|", PAGE.read_text(), re.M):
        for code in re.findall(r"`([a-z_]+)`", codes):
            found.setdefault(code, set()).update(status.split(" or "))
    return found


def kinds(base: type[RequestError] = RequestError) -> Iterator[type[RequestError]]:
    for each in base.__subclasses__():
        if each.__module__.startswith("serving."):
            yield each
            yield from kinds(each)


def refusals() -> set[tuple[str, str]]:
    """Code and status of every error that has a code of its own."""
    found = {
        (str(each.code), str(each.status))
        for each in kinds()
        if each.code and "status" in vars(each)
    }
    found |= {(str(CannotResumeError.code), status) for status in ("500", "503")}
    whats = ("model", "route", "scope", "service_tier")
    return found | {(str(ForbiddenError("k", what, "", ()).code), "403") for what in whats}


def test_every_refusal_is_in_the_reference_and_nothing_else() -> None:
    assert batch_errors.BatchesOffError in set(kinds())
    on_page = {(code, status) for code, statuses in listed().items() for status in statuses}

    # A field that a request may not have is refused with a code, and everything else without.
    assert on_page - {("unsupported_parameter", "400")} == refusals()
