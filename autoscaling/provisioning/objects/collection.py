"""Keeps the objects of one selection as the API server has them: listed once, then watched.

Owns what follows from events, cut connections and expired versions. Does not own what an object
means (`read` of its user) nor the wire (`kubernetes`).

Kubernetes promises this: a list shows one version, a watch sends every change after a version in
order, and a bookmark says that all changes up to a version have been sent. So a watch that was cut
goes on from the last version it heard of. Where the server no longer knows what came after that
(410), everything is listed anew.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from autoscaling.provisioning.errors import (
    ExpiredError,
    ProvisioningError,
    UnreachableError,
    UnusableError,
)
from autoscaling.provisioning.kubernetes import KubernetesApi
from autoscaling.provisioning.objects.wire import Selection, WatchEvent

logger = logging.getLogger(__name__)

# An older state is not planned on. The server's own limit to a request is longer; a change of its
# leader, or of one of its replicas, is shorter.
STALE_AFTER_S = 10.0
# What happened while no watch was open has come this long after one was opened.
CAUGHT_UP_S = 1.0
# The first wait after a failure is up to twice this, then twice as long each time.
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 30.0
# The server ends a watch after so long, at random up to twice as long: its replicas get their share
# of the watches again after one of them was away.
WATCH_S = 240

_T = TypeVar("_T")


class _ObjectMetadata(msgspec.Struct, frozen=True, rename={"version": "resourceVersion"}):
    name: str = ""
    version: str = ""


class _Head(msgspec.Struct, frozen=True):
    """What every object has."""

    metadata: _ObjectMetadata


@dataclass(frozen=True, slots=True)
class _Known(Generic[_T]):
    """An object as it was read, and the version that it had."""

    content: _T
    version: int


def backoff_s(num_failures: int, chance: float, retry_after_s: float | None) -> float:
    """Returns the seconds to wait after so many failures in a row; at least what was asked for.

    `chance` is a draw from 0 to 1: those who were cut off together come back one by one.
    """
    longest_s: float = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(num_failures, 10))
    return max(chance * longest_s, retry_after_s or 0.0)


class Collection(Generic[_T]):
    """The objects of a selection by name. Used from one event loop.

    `read` makes of an object's JSON what is kept of it. `on_change` is called after every change
    of what is kept. `clock` is monotonic, in seconds; `chance` draws from 0 to 1.
    """

    def __init__(
        self,
        api: KubernetesApi,
        selection: Selection,
        read: Callable[[msgspec.Raw], _T],
        *,
        on_change: Callable[[], None],
        clock: Callable[[], float],
        chance: Callable[[], float],
        stale_after_s: float = STALE_AFTER_S,
        watch_s: int = WATCH_S,
    ) -> None:
        self.selection = selection
        self._api = api
        self._read = read
        self._on_change = on_change
        self._clock = clock
        self._chance = chance
        self._stale_after_s = stale_after_s
        self._watch_s = watch_s
        self._objects: dict[str, _Known[_T]] = {}
        self._contents: tuple[_T, ...] | None = ()
        # Of the last change that was heard of; `None`: everything has to be listed.
        self._version: str | None = None
        # When what is known was last known to be up to date; `None` before the first list.
        self._fresh_at_s: float | None = None
        # Since when a watch is open; `None` while none is.
        self._open_since_s: float | None = None
        self._failure: ProvisioningError | None = None
        self._num_failures = 0

    def current(self) -> tuple[_T, ...]:
        """Returns all objects; the same tuple until one of them changes.

        Raises:
            ProvisioningError: they were never listed, or were not watched for too long. The class
                is that of the last failure.
        """
        if self._fresh_at_s is None:
            raise self._refusal("never listed")
        age_s = 0.0 if self._is_caught_up() else self._clock() - self._fresh_at_s
        if age_s > self._stale_after_s:
            raise self._refusal(f"not watched for {age_s:.1f} s")
        if self._contents is None:
            self._contents = tuple(known.content for known in self._objects.values())
        return self._contents

    async def refresh(self) -> None:
        """Reads all objects anew, a page at a time.

        Raises:
            ProvisioningError: they cannot be read. What was known before stays.
        """
        began_s = self._clock()
        found: dict[str, _Known[_T]] = {}
        version = ""
        async with aclosing(self._api.pages(self.selection)) as pages:
            async for page in pages:
                version = page.metadata.version
                for item in page.items:
                    metadata, known = self._decode(item)
                    found[metadata.name] = known
        is_same = {name: known.content for name, known in found.items()} == {
            name: known.content for name, known in self._objects.items()
        }
        self._objects, self._version, self._fresh_at_s = found, version, began_s
        if not is_same:
            self._note_change()

    async def follow(self) -> None:
        """Lists, unless that was done, and watches; again and again until it is cancelled."""
        while True:
            retry_after_s = None
            try:
                if self._version is None:
                    await self.refresh()
                await self._watch()
                # A server that ends every watch at once must not be asked without a pause.
                self._num_failures += 1
            except ProvisioningError as error:
                self.note_failure(error)
                retry_after_s = error.retry_after_s
            if self._num_failures:
                wait_s = backoff_s(self._num_failures, self._chance(), retry_after_s)
                await asyncio.sleep(wait_s)

    def accept(self, text: bytes) -> None:
        """Takes over an object as an answer to our own change has it, unless a later one is known.

        The watch sends it too, but only after a moment, and nobody may plan on the state before.
        """
        metadata, known = self._decode(msgspec.Raw(text))
        # The watch has sent everything up to its version, this object's deletion included.
        if self._version is not None and known.version > int(self._version):
            self._store(metadata, known)

    def note_failure(self, error: ProvisioningError) -> None:
        """Takes in why it was not read; `current` says so where it has nothing newer."""
        self._failure = error
        self._num_failures += 1
        if isinstance(error, ExpiredError | UnusableError):
            # What cannot be read now may be read as the next list has it.
            self._version = None
        logger.info("watch_failed resource=%s error=%r", self.selection.resource, str(error))

    async def _watch(self) -> None:
        """Follows one stream to its end."""
        assert self._version is not None
        timeout_s = int(self._watch_s * (1 + self._chance()))
        try:
            async with self._api.watch(self.selection, self._version, timeout_s) as events:
                self._open_since_s = self._clock()
                async with aclosing(events):
                    async for event in events:
                        self._heed(event)
                        self._num_failures, self._failure = 0, None
        finally:
            # A server that ends every watch at once has told nothing.
            if self._is_caught_up():
                self._fresh_at_s = self._clock()
            self._open_since_s = None

    def _is_caught_up(self) -> bool:
        since_s = self._open_since_s
        return since_s is not None and self._clock() - since_s >= CAUGHT_UP_S

    def _refusal(self, what: str) -> ProvisioningError:
        failure = self._failure or UnreachableError(f"no watch was open for {CAUGHT_UP_S:g} s")
        return type(failure)(f"{self.selection.resource}: {what}: {failure}", failure.retry_after_s)

    def _heed(self, event: WatchEvent) -> None:
        if event.type == "BOOKMARK":
            self._version = _head(event.object).version
            return
        metadata, known = self._decode(event.object)
        self._version = metadata.version
        self._store(metadata, known, is_deleted=event.type == "DELETED")

    def _store(
        self, metadata: _ObjectMetadata, known: _Known[_T], *, is_deleted: bool = False
    ) -> None:
        before = self._objects.get(metadata.name)
        if before is not None and before.version >= known.version:
            return
        if is_deleted:
            self._objects.pop(metadata.name, None)
        else:
            self._objects[metadata.name] = known
        if is_deleted or before is None or before.content != known.content:
            self._note_change()

    def _decode(self, item: msgspec.Raw) -> tuple[_ObjectMetadata, _Known[_T]]:
        metadata = _head(item)
        try:
            version = int(metadata.version)
        except ValueError as error:
            text = f"{self.selection.resource} {metadata.name}: no version of Kubernetes: {error}"
            raise UnusableError(text) from error
        return metadata, _Known(self._read(item), version)

    def _note_change(self) -> None:
        self._contents = None
        self._on_change()


def _head(item: msgspec.Raw) -> _ObjectMetadata:
    try:
        return msgspec.json.decode(item, type=_Head).metadata
    except msgspec.MsgspecError as error:
        raise UnusableError(f"an object without name and version: {error}") from error
