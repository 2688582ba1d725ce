"""Checks API keys, which decide who may use the gateway.

Keys are held hashed, and every comparison takes the same time. Keys in a file are read again when
the file changes, so that a key can be rotated without a restart.

A key may have a name, the tenant's. Several keys may have the same name. `serving.config.api_keys`
owns the form of keys in a file.
"""

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from serving.artifacts.model_source import resolve_file
from serving.config.api_keys import read_keys
from serving.config.application import AuthConfig
from serving.domain.errors import UnauthorizedError

logger = logging.getLogger(__name__)

# How long a changed file goes unnoticed. A kubelet takes about a minute to change a mounted Secret.
CHECK_INTERVAL_S = 5.0


def _digest(key: str) -> bytes:
    # A fast hash on purpose: keys are long random strings, not passwords, and each request pays for
    # it.
    return hashlib.sha256(key.encode()).digest()


class ApiKeys:
    """The accepted keys; several at once let a key be rotated. Without any, no key is needed."""

    def __init__(self, keys: Iterable[str], tenants: Mapping[str, str] | None = None) -> None:
        """Takes the `keys`; `tenants` has the names of the keys that have one, by key."""
        named = tenants or {}
        self._digests = tuple((_digest(key), named.get(key)) for key in keys)

    def __bool__(self) -> bool:
        """Returns whether a key is needed."""
        return bool(self._digests)

    def __repr__(self) -> str:
        """Returns the number of keys, never a key."""
        return f"ApiKeys({len(self._digests)})"

    def check(self, presented: str | None) -> str | None:
        """Passes a request that presented a known key, or any request when none is needed.

        Returns the tenant of the key; `None` if the key has no name, or if no key is needed.

        Raises:
            UnauthorizedError: no key or an unknown one. The client has to send a valid key.
        """
        if not self._digests:
            return None
        if presented is None:
            raise UnauthorizedError("No API key provided. Send it as 'Authorization: Bearer KEY'.")
        digest = _digest(presented)
        # Every key is compared, so that the time taken does not show which one matched.
        matches = [hmac.compare_digest(digest, known) for known, _ in self._digests]
        if not any(matches):
            raise UnauthorizedError
        return self._digests[matches.index(True)][1]


class KeysOfFile(ApiKeys):
    """The keys in a file, checked for changes every `CHECK_INTERVAL_S` while requests arrive.

    A changed file without usable keys is logged once, and the keys of before stay. So neither a
    typing mistake nor an empty file opens the gateway or keeps everybody out.
    """

    def __init__(
        self, path: Path, parse: Callable[[str], ApiKeys], now_s: Callable[[], float]
    ) -> None:
        """Reads the file; `parse` makes keys of its text, or raises `ValueError`.

        Raises:
            ValueError: `parse` refuses the file as it is now.
            OSError: the file cannot be read.
        """
        super().__init__(())
        self._path, self._parse, self._now_s = path, parse, now_s
        self._stamp = _stamp(path)
        self._checked_at_s = now_s()
        self._digests = parse(path.read_text())._digests

    def check(self, presented: str | None) -> str | None:
        """Checks a key as `ApiKeys.check` does, by the file as it is now."""
        now_s = self._now_s()
        if now_s - self._checked_at_s >= CHECK_INTERVAL_S:
            self._checked_at_s = now_s
            self._reread()
        return super().check(presented)

    def _reread(self) -> None:
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            text = self._path.read_text()
            self._stamp = stamp  # what cannot be read now is read at the next check
            self._digests = self._parse(text)._digests
        except (OSError, ValueError) as error:
            logger.error("api_keys_not_taken reason=%r kept=%d", str(error), len(self._digests))
            return
        logger.info("api_keys_taken count=%d", len(self._digests))


def _stamp(path: Path) -> tuple[int, int, int]:
    """Returns values that change with the file, also when a link to it moves (mounted Secret)."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Returns the key in OpenAI's header or in Anthropic's; `None` if neither is there."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer" and key:
                return key.strip()
        elif name == b"x-api-key":
            return value.decode("latin-1")
    return None


def load_keys(auth: AuthConfig) -> ApiKeys:
    """Loads the accepted API keys.

    Raises:
        ValueError: a named source has no key, and serving without one would open the gateway to
            everybody; or it names more tenants than are allowed.
    """
    if auth.keys_file is not None:
        source = f"auth.keys_file {auth.keys_file!r}"
        path = resolve_file(auth.keys_file)
        return KeysOfFile(path, lambda text: _keys_in(text, source, auth), time.monotonic)
    if auth.keys_env is not None:
        return _keys_in(os.environ.get(auth.keys_env, ""), f"auth.keys_env {auth.keys_env!r}", auth)
    return ApiKeys(())


def _keys_in(text: str, source: str, auth: AuthConfig) -> ApiKeys:
    keys = read_keys(text)
    if not keys:
        raise ValueError(f"{source} holds no API key")
    tenants = {key.key: key.tenant for key in keys if key.tenant is not None}
    num_tenants = len(set(tenants.values()))
    if num_tenants > auth.max_tenants:
        raise ValueError(
            f"{source} names {num_tenants} tenants; allowed: auth.max_tenants, {auth.max_tenants}"
        )
    return ApiKeys((key.key for key in keys), tenants)
