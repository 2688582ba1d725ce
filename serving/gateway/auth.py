"""API keys: who may use the gateway. Held hashed, and compared in the same time for each.

Of a file, keys are read again when it has changed, so that one is rotated without a restart.

A key may have a name, that of the tenant who asks with it: several keys may have the same one. How
keys are written in a file is in `serving.config.api_keys`.
"""

import hashlib
import hmac
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from serving.domain.errors import UnauthorizedError

logger = logging.getLogger(__name__)

# How long a changed file goes unnoticed. A kubelet takes about a minute to change a mounted Secret.
LOOK_S = 5.0


def _digest(key: str) -> bytes:
    # A fast hash on purpose: keys are long random strings, not passwords, and each request pays for
    # it.
    return hashlib.sha256(key.encode()).digest()


class ApiKeys:
    """The accepted keys; several at once let a key be rotated. Empty: nobody needs one."""

    def __init__(self, keys: Iterable[str], tenants: Mapping[str, str] | None = None) -> None:
        """`tenants` has the names of the keys that have one, by key."""
        named = tenants or {}
        self._digests = tuple((_digest(key), named.get(key)) for key in keys)

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return bool(self._digests)

    def __repr__(self) -> str:
        """The number of keys, never a key."""
        return f"ApiKeys({len(self._digests)})"

    def check(self, presented: str | None) -> str | None:
        """Passes a request that presented a known key, or any request when none is needed.

        Returns the tenant whose key it is; `None` of a key without a name, or where none is needed.

        Raises:
            UnauthorizedError: no key or an unknown one. The client has to send a valid key.
        """
        if not self._digests:
            return None
        if presented is None:
            raise UnauthorizedError("No API key provided. Send it as 'Authorization: Bearer KEY'.")
        digest = _digest(presented)
        # Every key is compared, so that the time taken does not say which one matched.
        matches = [hmac.compare_digest(digest, known) for known, _ in self._digests]
        if not any(matches):
            raise UnauthorizedError
        return self._digests[matches.index(True)][1]


class KeysOfFile(ApiKeys):
    """The keys in a file as it stands: looked at again every `LOOK_S` while requests arrive.

    A changed file that holds no usable keys changes nothing, and is logged once: who may
    ask does not depend on a slip of the pen, and nobody is let in by an empty file.
    """

    def __init__(
        self, path: Path, parse: Callable[[str], ApiKeys], now_s: Callable[[], float]
    ) -> None:
        """`parse` makes keys of the file's text, or raises `ValueError`.

        Raises:
            ValueError: what `parse` says of the file as it is now.
            OSError: it cannot be read.
        """
        super().__init__(())
        self._path, self._parse, self._now_s = path, parse, now_s
        self._stamp = _stamp(path)
        self._looked_at_s = now_s()
        self._digests = parse(path.read_text())._digests

    def check(self, presented: str | None) -> str | None:
        """As of `ApiKeys`, by the file as it is now."""
        now_s = self._now_s()
        if now_s - self._looked_at_s >= LOOK_S:
            self._looked_at_s = now_s
            self._look()
        return super().check(presented)

    def _look(self) -> None:
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._digests = self._parse(self._path.read_text())._digests
        except (OSError, ValueError) as error:
            logger.error("api_keys_not_taken reason=%r kept=%d", str(error), len(self._digests))
            return
        logger.info("api_keys_taken count=%d", len(self._digests))


def _stamp(path: Path) -> tuple[int, int, int]:
    """What changes with the file, also where a link to it is moved, as of a mounted Secret."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


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
