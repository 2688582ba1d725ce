"""Decides which requests below `/fleet` are for the dashboard, and which of them need no key.

The static files of the page hold no data, and a browser cannot send a key when it opens an address.
The fleet's JSON is the gateway's own. Pure.
"""

_STATIC = (".css", ".js")


def is_static_page(method: str, path: str, accept: str) -> bool:
    """Returns whether a request is for the page or a static part of it, which need no key."""
    if method not in ("GET", "HEAD"):
        return False
    if path == "/fleet":
        return prefers_html(accept)
    return path.startswith("/fleet/") and path.endswith(_STATIC)


def prefers_html(accept: str) -> bool:
    """Returns whether an `Accept` header prefers HTML to JSON; without a preference it is JSON."""
    return _quality(accept, "text/html") > _quality(accept, "application/json")


def _quality(accept: str, media_type: str) -> float:
    """Returns a media type's preference, 0 to 1; the range that names it most precisely decides."""
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
            continue  # a range without a readable weight counts for nothing
        decided, quality = ranges.index(name), weight
    return quality
