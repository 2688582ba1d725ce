"""A namespace for one test, and everything that is in it or was made for it gone afterwards."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from control_plane.api import Api, RefusedByServerError, reference, wait

from .cloud import NAMESPACE_LABEL

Json = dict[str, Any]

_numbers = itertools.count()


@contextlib.contextmanager
def own_namespace(api: Api, prefix: str = "ray") -> Iterator[str]:
    """Its name, which no other has."""
    name = f"{prefix}-{next(_numbers)}"
    api.apply(reference("Namespace", None, name))
    wait(lambda: api.find("ServiceAccount", name, "default"), f"{name} has its service account")
    try:
        yield name
    finally:
        empty(api, name)


def empty(api: Api, name: str) -> None:
    """Deletes a namespace, its pods at once, with their nodes. Does not wait for its end."""
    # Whoever holds an object back here has ended.
    for kind in ("RayService", "RayCluster"):
        for each in api.list(kind, name):
            api.merge(each, {"metadata": {"finalizers": None}})
    with contextlib.suppress(RefusedByServerError):
        api.delete(reference("Namespace", None, name))
    for kind, namespace, labels in (
        ("Pod", name, None),
        ("Node", None, {NAMESPACE_LABEL: name}),
    ):
        for each in api.list(kind, namespace, labels):
            with contextlib.suppress(RefusedByServerError):
                api.delete(each)
