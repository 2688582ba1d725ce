"""The part of a results page that a benchmark writes; the rest is written by hand."""

from collections.abc import Callable

_BEGIN, _END = "<!-- begin: measured -->", "<!-- end: measured -->"


def with_measured(page: str, measured: Callable[[], str]) -> str:
    """Returns the page with what `measured` returns in place of what stood between its two marks.

    Raises:
        ValueError: the lines that it stands between are not there.
    """
    before, _, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"the page has no lines {_BEGIN} and {_END} to write between")
    return f"{before}{_BEGIN}\n{measured()}\n{_END}{after}"
