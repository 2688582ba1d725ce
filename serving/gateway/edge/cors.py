"""Which web pages may ask the gateway from a browser: cross-origin resource sharing.

Closed unless `gateway.cors_origins` names origins. A key is a header and no cookie, so no page is
let in by what a browser keeps. Pure.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

Header = tuple[bytes, bytes]

# How long a browser may keep the answer to a preflight; browsers keep it for two hours at most.
_MAX_AGE_S = 600
# What a page may read of an answer beside its body.
_EXPOSED = b"x-request-id, retry-after, x-should-retry, allow"
_ANY = "*"


@dataclass(frozen=True, slots=True)
class CorsAnswer:
    """The headers that allow a page to read an answer, or the reason why it may not."""

    headers: tuple[Header, ...] = ()
    refusal: str | None = None


def is_preflight(method: str, headers: Iterable[Header]) -> bool:
    """Returns whether a browser asks what a page may send, before it sends it."""
    names = {name for name, _ in headers}
    return method == "OPTIONS" and {b"origin", b"access-control-request-method"} <= names


def allow_origin(headers: Iterable[Header], allowed: Collection[str]) -> CorsAnswer:
    """Returns what a page may read, by the `Origin` of its request; nothing without one."""
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    if not allowed or not origins:
        return CorsAnswer()
    if _ANY in allowed:
        return CorsAnswer(
            (
                (b"access-control-allow-origin", b"*"),
                (b"access-control-expose-headers", _EXPOSED),
            )
        )
    vary = (b"vary", b"Origin")
    (origin, *others) = origins
    if others or origin not in allowed:
        return CorsAnswer((vary,), "pages of this origin may not ask here: gateway.cors_origins")
    return CorsAnswer(
        (
            vary,
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", _EXPOSED),
        )
    )


def preflight_headers(methods: Iterable[str]) -> dict[str, str]:
    """Returns what else an allowed preflight is answered with.

    `*` means every header but `Authorization`, which has to be named.
    """
    return {
        "access-control-allow-methods": ", ".join(methods),
        "access-control-allow-headers": "authorization, *",
        "access-control-max-age": str(_MAX_AGE_S),
    }
