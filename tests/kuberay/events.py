"""Events as KubeRay writes them; what is repeated is a series of one event."""

from typing import Any

from control_plane.api import Api, RefusedByServerError

Json = dict[str, Any]

_HTTP_CONFLICT = 409


class Events:
    """Writes the events of one controller, such as `raycluster-controller`.

    What is said again of the same version of an object, for the same reason, becomes a series: its
    first words stay, and its count is 2 however often it is said.
    """

    def __init__(self, api: Api, controller: str) -> None:
        self._api = api
        self._controller = controller
        self._number = 0
        self._said: dict[tuple[str, str, str, str], Json | None] = {}

    def note(
        self, of: Json, reason: str, action: str, words: str, now: str, *, is_bad: bool = False
    ) -> None:
        """Says `words` of an object. `now` is the time in microseconds, as Kubernetes writes it."""
        metadata = of["metadata"]
        key = (metadata["uid"], metadata["resourceVersion"], reason, action)
        if key not in self._said:
            event = self._event(of, reason, action, words, now, is_bad=is_bad)
            self._said[key] = self._api.create(event)
        elif (first := self._said[key]) is not None:
            series = {"count": 2, "lastObservedTime": now}
            self._said[key] = None
            self._api.merge(first, {"series": series})

    def _event(
        self, of: Json, reason: str, action: str, words: str, now: str, *, is_bad: bool
    ) -> Json:
        self._number += 1
        metadata = of["metadata"]
        name, namespace = metadata["name"], metadata["namespace"]
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{name}.{self._controller}.{metadata['resourceVersion']}-{self._number}",
                "namespace": namespace,
            },
            "involvedObject": {
                "apiVersion": "ray.io/v1",
                "kind": of["kind"],
                "name": name,
                "namespace": namespace,
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "type": "Warning" if is_bad else "Normal",
            "reason": reason,
            "action": action,
            "message": words,
            "eventTime": now,
            "reportingComponent": self._controller,
            "reportingInstance": f"{self._controller}-emulated",
            "source": {},
        }


def made_now(api: Api, body: Json) -> bool:
    """Creates an object that is not there yet; whether it was not."""
    try:
        api.create(body)
    except RefusedByServerError as error:
        if error.code == _HTTP_CONFLICT:
            return False
        raise
    return True
