"""The fleet as a page for people: its static files, and who gets it instead of the JSON.

The page holds no data and asks for no key: a browser could not send one when it opens an address.
Its script asks the reader for the key and fetches the JSON with it. Everything it shows is another
program's word, so its policy lets no other script run than the one shipped here.
"""

from importlib.resources import files

from starlette.responses import Response

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
    # An upgraded gateway's page is asked for again.
    "cache-control": "no-cache",
}
_PAGE_HEADERS = {**_HEADERS, "vary": "Accept"}
_PARTS = {
    "fleet.css": "text/css",
    "charts.css": "text/css",
    "fleet.js": "text/javascript",
    "charts.js": "text/javascript",
    "chart.js": "text/javascript",
    "kinds.js": "text/javascript",
    "history.js": "text/javascript",
}


class FleetPage:
    """The page's files, read once."""

    def __init__(self) -> None:
        folder = files(__name__)
        self._page = folder.joinpath("index.html").read_bytes()
        self._parts = {
            f"/fleet/{name}": (folder.joinpath(name).read_bytes(), media_type)
            for name, media_type in _PARTS.items()
        }

    def answer(self, method: str, path: str, accept: str) -> Response | None:
        """The page or a part of it; `None` for every other request, such as one for the JSON."""
        if method not in ("GET", "HEAD"):
            return None
        if path == "/fleet" and prefers_html(accept):
            return Response(self._page, media_type="text/html", headers=_PAGE_HEADERS)
        if path in self._parts:
            body, media_type = self._parts[path]
            return Response(body, media_type=media_type, headers=_HEADERS)
        return None


def prefers_html(accept: str) -> bool:
    """Whether an `Accept` header wants HTML rather than JSON; JSON when it has no preference."""
    return _quality(accept, "text/html") > _quality(accept, "application/json")


def _quality(accept: str, media_type: str) -> float:
    """How much a media type is wanted, 0 to 1; the range that names it most precisely decides."""
    ranges = ("*/*", f"{media_type.partition('/')[0]}/*", media_type)
    decided, quality = -1, 0.0
    for part in accept.lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        if name not in ranges or ranges.index(name) < decided:
            continue
        weights = [text.removeprefix("q=") for text in parameters if text.startswith("q=")]
        try:
            weight = float(weights[0]) if weights else 1.0
        except ValueError:
            continue  # a range without a readable weight says nothing
        decided, quality = ranges.index(name), weight
    return quality
