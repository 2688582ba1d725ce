"""Makes our HAProxy configuration of the one that Ray Serve writes. Pure: text in, text out.

Ray Serve 2.60 knows the gateways and writes them into a template of its own, which leaves open what
a public address needs: see ADR 21. Every change here names the line that it replaces. A
configuration without that line is not what this was written for, and is refused as a whole: the
ingress that runs goes on, and Serve logs the reason.
"""

import re
from dataclasses import dataclass

HEADER_TIMEOUT_S, IDLE_TIMEOUT_S, ADMIN_HOST = 10, 300, "127.0.0.1"
# HAProxy takes two descriptors for each connection and, for a quarter of them, a pipe of two more
# (2.8, which ends at once if it may not have them); and some for listeners, checks and logs.
_DESCRIPTORS_PER_CONNECTION, _OTHER_DESCRIPTORS = 2.5, 200
# Connections above the most requests at once: room to say no, and for those without a request.
_REFUSING_SHARE, _REFUSING_LEAST = 16, 8
_RETRY_AFTER_S = 5
_REFUSAL = (
    '{"error":{"message":"The ingress has no room for another request.",'
    '"type":"overloaded_error","param":null,"code":"too_many_connections"}}'
)


class UnknownConfigurationError(Exception):
    """Reports a configuration that Ray Serve has written in another way than 2.60 does."""


@dataclass(frozen=True, slots=True)
class IngressLimits:
    """The bounds of one ingress. Times are whole seconds.

    A client has `header_timeout_s` for a request's head, and `idle_timeout_s` between two sends or
    two reads; beyond that its connection is closed. `max_connections` are accepted; who comes then
    waits until one closes. `admin_host` is where statistics and metrics listen.
    """

    max_connections: int
    header_timeout_s: int = HEADER_TIMEOUT_S
    idle_timeout_s: int = IDLE_TIMEOUT_S
    admin_host: str = ADMIN_HOST

    @property
    def num_served(self) -> int:
        """The requests that are served at once; those above it are answered with 503."""
        refusing = max(_REFUSING_LEAST, self.max_connections // _REFUSING_SHARE)
        return max(1, self.max_connections - refusing)


def connections_for(num_descriptors: int, wanted: int) -> int:
    """Returns how many of the wanted connections a process with so many descriptors can hold."""
    allowed = (num_descriptors - _OTHER_DESCRIPTORS) / _DESCRIPTORS_PER_CONNECTION
    return max(1, min(wanted, int(allowed)))


def own_configuration(text: str, limits: IngressLimits) -> str:
    """Returns `text`, as Ray Serve wrote it, with our limits in the place of its own.

    Raises:
        UnknownConfigurationError: a line that is to be replaced is not there, or twice.
    """
    admin, most, served = limits.admin_host, limits.max_connections, limits.num_served
    # One entry, which every request refers to from its head to its end: what is refused for are
    # requests. Connections without one end soon, and would keep out those who have done nothing.
    refusal = (
        "    stick-table type integer size 1 store conn_cur\n"
        "    http-request track-sc0 int(0)\n"
        "    http-request return status 503 content-type application/json "
        f"string '{_REFUSAL}' hdr Retry-After {_RETRY_AFTER_S} if {{ sc_conn_cur(0) gt {served} }}"
    )
    # Of how Serve treats a request, nothing is the client's to say. Gateways see themselves that a
    # client leaves (`serving.gateway.streams.leaving`).
    steering = (
        "    http-request del-header x-request-timeout-seconds\n"
        "    http-request set-header x-request-disconnect-disabled ?1"
    )
    timeouts = (
        f"    timeout client {limits.idle_timeout_s}s\n"
        f"    timeout http-request {limits.header_timeout_s}s"
    )
    # An HAProxy that was replaced ends with its last stream, and not after a time.
    text = re.sub(r"^    hard-stop-after \d+s\n", "", text, flags=re.MULTILINE)
    for section, line, new in (
        ("global", r"    stats socket (\S+) mode 666 ", r"    stats socket \1 mode 600 "),
        ("global", r"    maxconn \d+$", f"    maxconn {most}"),
        ("defaults", r"    timeout client \d+s$", timeouts),
        # With it HAProxy 2.8 does not see that a client leaves whose body came behind its head.
        ("defaults", r"    option splice-request\n", ""),
        ("frontend prometheus", r"    bind :(\d+)$", rf"    bind {admin}:\1"),
        ("listen stats", r"  bind \*:(\d+)$", rf"  bind {admin}:\1"),
        # Behind the answers to health checks, which a busy ingress gives too.
        (
            "frontend http_frontend",
            r"    (# Per-backend path ACLs)",
            f"{refusal}\n{steering}\n    \\1",
        ),
    ):
        text = _replaced(text, section, line, new)
    return text


def _replaced(text: str, section: str, line: str, new: str) -> str:
    """Returns the text with the one line that matches in a section replaced."""
    begin, end = _span(text, section)
    pattern = re.compile(f"^{line}", re.MULTILINE)
    found = len(pattern.findall(text, begin, end))
    if found != 1:
        raise UnknownConfigurationError(
            f"{found} lines of the section `{section}` match `{line}` in the configuration that "
            "Ray Serve wrote; needed: one, as of Ray 2.60"
        )
    match = pattern.search(text, begin, end)
    assert match is not None
    return text[: match.start()] + match.expand(new) + text[match.end() :]


def _span(text: str, section: str) -> tuple[int, int]:
    """Returns where a section begins and ends: at the next line that is not indented."""
    start = re.search(rf"^{re.escape(section)}$", text, re.MULTILINE)
    if start is None:
        raise UnknownConfigurationError(f"there is no section `{section}`; Ray 2.60 writes one")
    following = re.compile(r"^\S", re.MULTILINE).search(text, start.end())
    return start.start(), len(text) if following is None else following.start()
