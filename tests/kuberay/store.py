"""What the API server stores: objects with versions, and a way to wait for a change."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .json_patch import PatchError, apply_patch
from .schema import CrdSchema

Json = dict[str, Any]


class NotFoundError(LookupError):
    """There is no such object."""


class ConflictError(RuntimeError):
    """The object has another version than the writer believed."""


class InvalidError(ValueError):
    """The patch does not apply, or what comes of it is not valid."""


class Store:
    """Objects of one namespace by resource and name. Thread-safe; what goes in or out is copied.

    `schemas` are by resource; objects of other resources are taken as they come.
    """

    def __init__(self, schemas: Mapping[str, CrdSchema]) -> None:
        self._schemas = schemas
        self._objects: dict[tuple[str, str], Json] = {}
        self._version = 0
        self._changed = threading.Condition(threading.RLock())

    @property
    def version(self) -> str:
        """Of the latest change."""
        with self._changed:
            return str(self._version)

    def create(self, resource: str, document: Json) -> Json:
        """Stores a new object, defaults filled in."""
        with self._changed:
            schema = self._schemas.get(resource)
            document = schema.defaulted(document) if schema else copy.deepcopy(document)
            return self._write(resource, document)

    def get(self, resource: str, name: str) -> Json:
        """One object."""
        with self._changed:
            return copy.deepcopy(self._get(resource, name))

    def list(self, resource: str, labels: Mapping[str, str] | None = None) -> list[Json]:
        """All objects with these labels, by name."""
        wanted = (labels or {}).items()
        with self._changed:
            return [
                copy.deepcopy(document)
                for (kind, _), document in sorted(self._objects.items(), key=lambda each: each[0])
                if kind == resource and wanted <= document["metadata"].get("labels", {}).items()
            ]

    def patch(self, resource: str, name: str, operations: Sequence[Json]) -> Json:
        """Applies a JSON patch, or nothing of it."""
        with self._changed:
            stored = self._get(resource, name)
            try:
                patched = apply_patch(stored, operations)
            except PatchError as error:
                raise InvalidError(str(error)) from error
            if patched["metadata"]["resourceVersion"] != stored["metadata"]["resourceVersion"]:
                raise ConflictError(f"{resource} {name!r} has been modified")
            return self._write(resource, patched)

    @contextmanager
    def edit(self, resource: str, name: str) -> Iterator[Json]:
        """The object for changing in place: the way of the operator, and of a user's editor."""
        with self._changed:
            document = copy.deepcopy(self._get(resource, name))
            yield document
            self._write(resource, document)

    def delete(self, resource: str, name: str) -> None:
        """Removes an object; none is no error."""
        with self._changed:
            if self._objects.pop((resource, name), None) is not None:
                self._note_change()

    def wait(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `is_so` of what is stored; whether it came to be."""
        with self._changed:
            return self._changed.wait_for(is_so, timeout_s)

    def wait_change(self, version: str, timeout_s: float) -> str:
        """Waits for a change after `version`; the version then."""
        self.wait(lambda: self.version != version, timeout_s)
        return self.version

    def _get(self, resource: str, name: str) -> Json:
        try:
            return self._objects[resource, name]
        except KeyError:
            raise NotFoundError(f'{resource} "{name}" not found') from None

    def _write(self, resource: str, document: Json) -> Json:
        schema = self._schemas.get(resource)
        if schema and (complaints := schema.complaints(document)):
            raise InvalidError("; ".join(complaints))
        self._note_change()
        document["metadata"]["resourceVersion"] = str(self._version)
        self._objects[resource, document["metadata"]["name"]] = document
        return copy.deepcopy(document)

    def _note_change(self) -> None:
        self._version += 1
        self._changed.notify_all()
