"""A kubelet's readiness probes, of pods behind which something answers on this machine."""

import logging
import threading
from datetime import UTC, datetime
from typing import Any

import httpx
from control_plane.api import Api, RefusedByServerError
from control_plane.kubelet import PROBED

logger = logging.getLogger(__name__)

Json = dict[str, Any]

_PERIOD_S = 0.5
_GONE = 404
_OF_PROBES = ("Ready", "ContainersReady")


class Prober:
    """Asks every pod that is marked `PROBED` by its own HTTP probe, and says whether it is Ready.

    A context manager. `url` is what answers for all of them, in the place of a pod's address and
    port. One answer decides, whatever thresholds a probe has.
    """

    def __init__(self, api: Api, namespace: str, url: str) -> None:
        self._api = api
        self._namespace = namespace
        self._url = url
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prober")

    def __enter__(self) -> "Prober":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD_S):
            try:
                for pod in self._api.list("Pod", self._namespace):
                    if PROBED in pod["metadata"].get("annotations", {}):
                        self._probe(pod)
            except Exception:
                logger.exception("prober_failed")

    def _probe(self, pod: Json) -> None:
        if pod["status"].get("phase") != "Running":
            return
        status = "True" if self._answers(pod) else "False"
        conditions = pod["status"].get("conditions", [])
        others = [each for each in conditions if each["type"] not in _OF_PROBES]
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        told = [{"type": kind, "status": status, "lastTransitionTime": now} for kind in _OF_PROBES]
        if all(_status_of(pod, kind) == status for kind in _OF_PROBES):
            return
        try:
            self._api.merge(pod, {"status": {"conditions": [*others, *told]}}, "status")
        except RefusedByServerError as error:
            if error.code != _GONE:
                raise

    def _answers(self, pod: Json) -> bool:
        probe = pod["spec"]["containers"][0]["readinessProbe"]
        url = f"{self._url}{probe['httpGet']['path']}"
        try:
            # Plain HTTP: without `verify` every call would read all root certificates anew.
            answer = httpx.get(url, timeout=probe["timeoutSeconds"], verify=False)
        except httpx.HTTPError:
            return False
        # As a kubelet judges.
        return 200 <= answer.status_code < 400


def _status_of(pod: Json, kind: str) -> str | None:
    conditions = pod["status"].get("conditions", [])
    return next((each["status"] for each in conditions if each["type"] == kind), None)
