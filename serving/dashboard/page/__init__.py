"""The fleet as a page for people: its static files.

The page holds no data and asks for no key: a browser could not send one when it opens an address.
Its script asks the reader for the key and fetches the JSON with it. Everything on it comes from
another program, so its policy lets no other script run than the one shipped here.
"""

from http import HTTPStatus
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

from serving.domain.dashboard_messages import PageAnswer

_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src data:",  # the icon in the page's own head
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Browsers that know these two refuse to make markup out of text at all.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # An upgraded dashboard's page is asked for again.
    "cache-control": "no-cache",
}
_PAGE_HEADERS = {**_HEADERS, "vary": "Accept"}
_PARTS = {
    "fleet.css": "text/css",
    "charts.css": "text/css",
    "fleet.js": "text/javascript",
    "elements.js": "text/javascript",
    "tenants.js": "text/javascript",
    "charts.js": "text/javascript",
    "chart.js": "text/javascript",
    "kinds.js": "text/javascript",
    "history.js": "text/javascript",
}


# The plotting library is a locked dependency; its files are read where pip has put them.
_PLOTTING = "uplot-python"
_PLOTTING_PARTS = {
    "uPlot.min.css": "text/css",
    "uPlot.iife.js": "text/javascript",
}


def page_answers() -> dict[str, PageAnswer]:
    """Returns the page and its parts by path, read from their files."""
    folder = files(__name__)
    page = folder.joinpath("index.html").read_bytes()
    headers = {**_PAGE_HEADERS, "content-type": "text/html; charset=utf-8"}
    answers = {"/fleet": PageAnswer(HTTPStatus.OK, page, headers)}
    for name, media_type in _PARTS.items():
        answers[f"/fleet/{name}"] = _part(media_type, folder.joinpath(name).read_bytes())
    library = distribution(_PLOTTING)
    for name, media_type in _PLOTTING_PARTS.items():
        path = Path(str(library.locate_file(f"uplot/static/{name}")))
        answers[f"/fleet/{name}"] = _part(media_type, path.read_bytes())
    return answers


def _part(media_type: str, body: bytes) -> PageAnswer:
    headers = {**_HEADERS, "content-type": f"{media_type}; charset=utf-8"}
    return PageAnswer(HTTPStatus.OK, body, headers)
