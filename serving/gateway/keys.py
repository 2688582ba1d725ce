"""API keys: who may use the gateway. Held hashed, and compared in the same time for each."""

import hashlib
import hmac
from collections.abc import Iterable

from serving.errors import UnauthorizedError


def _digest(key: str) -> bytes:
    # A fast hash on purpose: keys are long random strings, not passwords, and each request pays for
    # it.
    return hashlib.sha256(key.encode()).digest()


class ApiKeys:
    """The accepted keys; several at once let a key be rotated. Empty: nobody needs one."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return bool(self._digests)

    def __repr__(self) -> str:
        """The number of keys, never a key."""
        return f"ApiKeys({len(self._digests)})"

    def check(self, presented: str | None) -> None:
        """Passes a request that presented a known key, or any request when none is needed.

        Raises:
            UnauthorizedError: no key or an unknown one. The client has to send a valid key.
        """
        if not self._digests:
            return
        if presented is None:
            raise UnauthorizedError("No API key provided. Send it as 'Authorization: Bearer KEY'.")
        digest = _digest(presented)
        # Every key is compared, so that the time taken does not say which one matched.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise UnauthorizedError


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The key in OpenAI's header or in Anthropic's; `None` if neither is there."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer" and key:
                return key.strip()
        elif name == b"x-api-key":
            return value.decode("latin-1")
    return None


def read_keys(text: str) -> list[str]:
    """Keys from a file or a variable: apart by commas or line ends; `#` starts a comment line."""
    lines = (line.strip() for line in text.splitlines())
    parts = (part.strip() for line in lines if not line.startswith("#") for part in line.split(","))
    return [part for part in parts if part]
