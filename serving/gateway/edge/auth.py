"""Checks API keys, which decide who may use the gateway, and for what.

Keys are held hashed. A key is looked up by a digest that is made with a secret of this process, so
that the time of a look-up tells nothing of the keys there are. Keys in a file are read again when
the file changes, so that a key can be rotated without a restart.

`serving.config.api_keys` owns the form of keys in a file, and what a record of one may say.
"""

import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path

from serving.artifacts.model_source import resolve_file
from serving.config.api_keys import KeyRecord, KeyScope, read_keys
from serving.config.application import AuthConfig
from serving.domain.errors import ExpiredKeyError, ForbiddenError, UnauthorizedError
from serving.domain.models.request_fields.service_class import ServiceTier
from serving.domain.usage.quotas import Quota
from serving.gateway.batches.records import KeyOfBatch, tenant_of

logger = logging.getLogger(__name__)

# How long a changed file goes unnoticed. A kubelet takes about a minute to change a mounted Secret.
CHECK_INTERVAL_S = 5.0

# What everybody may do where no key is needed.
ANYBODY = KeyRecord(b"")


class ApiKeys:
    """The accepted keys; several at once let a key be rotated. Without any, no key is needed."""

    def __init__(self, records: Iterable[KeyRecord]) -> None:
        """Takes the records of the keys; of two records of one key the last one counts."""
        self._secret = secrets.token_bytes(32)
        self._records = self._by_blinded_digest(records)

    def __bool__(self) -> bool:
        """Returns whether a key is needed."""
        return bool(self._records)

    @property
    def quotas(self) -> dict[str, tuple[Quota, ...]]:
        """The quotas of each tenant that has some."""
        return {
            record.tenant: record.quotas
            for record in self._records.values()
            if record.quotas and record.tenant is not None
        }

    def __repr__(self) -> str:
        """Returns the number of keys, never a key."""
        return f"{type(self).__name__}({len(self._records)})"

    def check(self, presented: str | None, now_s: float) -> KeyRecord:
        """Passes a request that presented a known key, or any request when none is needed.

        `now_s` is Unix time. Returns what the key may do; everything if no key is needed.

        Raises:
            UnauthorizedError: no key or an unknown one. The client has to send a valid key.
            ExpiredKeyError: the key has ended. The client has to get another one.
        """
        if not self._records:
            return ANYBODY
        if presented is None:
            raise UnauthorizedError("No API key provided. Send it as 'Authorization: Bearer KEY'.")
        record = self._records.get(self._blinded(hashlib.sha256(presented.encode()).digest()))
        return _valid(record, now_s)

    def check_later(self, key: KeyOfBatch, tenant: str, now_s: float) -> KeyRecord:
        """Passes what was asked for by a key some time ago, if that key may still ask.

        A key that is gone is stood for by the one that has its record's name and its `tenant` now.
        Without keys everything passes, as by `check`; the errors are those too.
        """
        if not self._records:
            return ANYBODY
        record = self._records.get(self._blinded(bytes.fromhex(key.digest)))
        if record is None and key.name is not None:
            of_name = (each for each in self._records.values() if each.name == key.name)
            record = next((each for each in of_name if tenant_of(each) == tenant), None)
        return _valid(record, now_s)

    def _by_blinded_digest(self, records: Iterable[KeyRecord]) -> dict[bytes, KeyRecord]:
        return {self._blinded(record.digest): record for record in records}

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


class KeysOfFile(ApiKeys):
    """The keys in a file, checked for changes every `CHECK_INTERVAL_S` while requests arrive.

    A changed file without usable keys is logged once, and the keys of before stay. So neither a
    typing mistake nor an empty file opens the gateway or keeps everybody out.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[str], list[KeyRecord]],
        monotonic_s: Callable[[], float],
    ) -> None:
        """Reads the file; `parse` makes records of its text, or raises `ValueError`.

        Raises:
            ValueError: `parse` refuses the file as it is now.
            OSError: the file cannot be read.
        """
        self._path, self._parse, self._monotonic_s = path, parse, monotonic_s
        self._stamp = _stamp(path)
        self._checked_at_s = monotonic_s()
        super().__init__(parse(path.read_text()))

    def check(self, presented: str | None, now_s: float) -> KeyRecord:
        """Checks a key as `ApiKeys.check` does, by the file as it is now."""
        self._reread_in_time()
        return super().check(presented, now_s)

    def check_later(self, key: KeyOfBatch, tenant: str, now_s: float) -> KeyRecord:
        """Checks as `ApiKeys.check_later` does, by the file as it is now."""
        self._reread_in_time()
        return super().check_later(key, tenant, now_s)

    def _reread_in_time(self) -> None:
        monotonic_s = self._monotonic_s()
        if monotonic_s - self._checked_at_s >= CHECK_INTERVAL_S:
            self._checked_at_s = monotonic_s
            self._reread()

    def _reread(self) -> None:
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            text = self._path.read_text()
            self._stamp = stamp  # what cannot be read now is read at the next check
            self._records = self._by_blinded_digest(self._parse(text))
        except (OSError, ValueError) as error:
            logger.error("api_keys_not_taken reason=%r kept=%d", str(error), len(self._records))
            return
        logger.info("api_keys_taken count=%d", len(self._records))


def _valid(record: KeyRecord | None, now_s: float) -> KeyRecord:
    """Returns a record that may be used; see `ApiKeys.check`."""
    if record is None:
        raise UnauthorizedError
    if record.expires_at_s is not None and now_s >= record.expires_at_s:
        ended_at = datetime.fromtimestamp(record.expires_at_s, UTC)
        raise ExpiredKeyError(record.name or "", f"{ended_at:%Y-%m-%dT%H:%M:%SZ}")
    return record


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


def check_scope(record: KeyRecord, scope: KeyScope) -> None:
    """Refuses a key that is not for this.

    Raises:
        ForbiddenError: it is not. The client needs another key.
    """
    if scope not in record.scopes:
        raise _forbidden(record, "scope", scope, record.scopes)


def check_route(record: KeyRecord, path: str) -> None:
    """Refuses a key that is not for the models' route `path`.

    Raises:
        ForbiddenError: it is not. The client needs another key.
    """
    check_scope(record, KeyScope.INFERENCE)
    if record.routes is not None and path not in record.routes:
        raise _forbidden(record, "route", path, record.routes)


def check_model(record: KeyRecord, name: str) -> None:
    """Refuses a key that is not for the model or adapter `name`, whether or not there is one.

    Raises:
        ForbiddenError: it is not. The client has to name a model that is allowed.
    """
    if not may_use(record, name):
        raise _forbidden(record, "model", name, record.models or ())


def check_tier(record: KeyRecord, tier: ServiceTier) -> None:
    """Refuses a key that is not for the `service_tier` that a request asks for.

    Raises:
        ForbiddenError: it is not. The client has to ask for what is allowed.
    """
    if tier not in record.service_tiers:
        raise _forbidden(record, "service_tier", tier, record.service_tiers)


def may_use(record: KeyRecord, name: str) -> bool:
    """Returns whether a key is for the model or adapter `name`."""
    return record.models is None or name in record.models


def _forbidden(
    record: KeyRecord, what: str, asked: str, allowed: Collection[str]
) -> ForbiddenError:
    return ForbiddenError(record.name or "", what, str(asked), sorted(map(str, allowed)))


def load_keys(auth: AuthConfig) -> ApiKeys:
    """Loads the accepted API keys.

    Raises:
        ValueError: a named source has no key, and serving without one would open the gateway to
            everybody; or it has something else in it, or more tenants than are allowed.
    """
    if auth.keys_file is not None:
        source = f"auth.keys_file {auth.keys_file!r}"
        path = resolve_file(auth.keys_file)
        return KeysOfFile(path, lambda text: _keys_in(text, source, auth), time.monotonic)
    if auth.keys_env is not None:
        text = os.environ.get(auth.keys_env, "")
        return ApiKeys(_keys_in(text, f"auth.keys_env {auth.keys_env!r}", auth))
    return ApiKeys(())


def _keys_in(text: str, source: str, auth: AuthConfig) -> list[KeyRecord]:
    try:
        keys = read_keys(text)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    if not keys:
        raise ValueError(f"{source} holds no API key")
    num_tenants = len({key.tenant for key in keys if key.tenant is not None})
    if num_tenants > auth.max_tenants:
        raise ValueError(
            f"{source} names {num_tenants} tenants; allowed: auth.max_tenants, {auth.max_tenants}"
        )
    return keys
