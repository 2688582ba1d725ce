"""Defines the forms in which the Kubernetes API lists and watches. Pure.

Objects in pages and events stay undecoded, so that each caller takes what it needs.
"""

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

import msgspec

from autoscaling.provisioning.errors import UnusableError

# etcd takes no object above 1.5 MiB; a longer line of a watch is none.
MAX_LINE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Selection:
    """The objects to list or watch, such as `pods` (resource) of `api/v1` (group).

    `labels` is a Kubernetes label selector, empty for any. `name` is that of the only object that
    is meant; `None` for all. Objects that are in no namespace, such as nodes, are not
    `is_namespaced`.
    """

    group: str
    resource: str
    labels: str = ""
    name: str | None = None
    is_namespaced: bool = True

    @property
    def parameters(self) -> dict[str, str]:
        """The selectors, as the API takes them."""
        found = {"labelSelector": self.labels} if self.labels else {}
        return (
            found if self.name is None else {**found, "fieldSelector": f"metadata.name={self.name}"}
        )


class PageMetadata(
    msgspec.Struct, frozen=True, rename={"version": "resourceVersion", "next_page": "continue"}
):
    """The version that the list shows, and the token for its next page, empty on the last."""

    version: str = ""
    next_page: str = ""


class ListPage(msgspec.Struct, frozen=True):
    """Some objects of a list, undecoded."""

    metadata: PageMetadata
    items: list[msgspec.Raw]


class WatchEvent(msgspec.Struct, frozen=True):
    """A change: `ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`, with the object as it is after it.

    A bookmark's object has nothing but the version up to which all changes have been sent.
    """

    type: str
    object: msgspec.Raw


class ServerStatus(msgspec.Struct, frozen=True):
    """The API server's report of a failure."""

    code: int = 500
    message: str = ""


async def split_lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yields whole lines; the piece of one that a cut connection leaves is dropped."""
    rest = bytearray()
    async for chunk in chunks:
        *lines, last = chunk.split(b"\n")
        for line in lines:
            rest += line
            if rest:
                yield bytes(rest)
            rest.clear()
        rest += last
        if len(rest) > MAX_LINE_BYTES:
            raise UnusableError(f"a line of a watch is longer than {MAX_LINE_BYTES} bytes")
