"""What KubeRay's operator asks of Ray's dashboards: to take Serve's configuration, and how it does.

`ToldDashboard` stands in their place, `ServeDashboard` asks a real one.
"""

import time
from typing import Any, Protocol

import httpx
import yaml

Json = dict[str, Any]

# It starts Serve where it does not run yet.
_TAKES_WITHIN_S = 120.0
# KubeRay looks every 2 s, the emulated operator many times a second.
_ASKED_AGAIN_S = 1.0


class DashboardAwayError(RuntimeError):
    """The dashboard does not answer, or does not do what it was asked. Ask again."""


class Dashboard(Protocol):
    """The dashboards of the clusters of a namespace."""

    def take(self, cluster: str, config: str) -> None:
        """Takes Serve's configuration for a cluster; raises `DashboardAwayError`."""
        ...

    def applications(self, cluster: str) -> Json:
        """How a cluster's applications are, by name; nothing where it does not answer."""
        ...


class ToldDashboard:
    """The dashboards of all clusters. `statuses` are of Serve's applications, by cluster.

    `""` stands for every cluster that is not named. `taken` are the clusters whose configuration
    was sent, one entry for every time.
    """

    def __init__(self) -> None:
        self.statuses: dict[str, Json] = {}
        self.taken: list[str] = []

    def take(self, cluster: str, config: str) -> None:
        """Takes Serve's configuration for a cluster."""
        self.taken.append(cluster)

    def applications(self, cluster: str) -> Json:
        """How a cluster's applications are, by name."""
        return self.statuses.get(cluster, self.statuses.get("", {}))


class ServeDashboard:
    """A real dashboard of Ray, of the one cluster that there is."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/api/serve/applications/"
        self._told: Json = {}
        self._told_at_s = float("-inf")

    def take(self, cluster: str, config: str) -> None:
        """Deploys the configuration, as `serve deploy` does."""
        try:
            answer = httpx.put(self._url, json=yaml.safe_load(config), timeout=_TAKES_WITHIN_S)
        except httpx.HTTPError as error:
            raise DashboardAwayError(repr(error)) from error
        if answer.is_error:
            raise DashboardAwayError(f"{answer.status_code}: {answer.text}")

    def applications(self, cluster: str) -> Json:
        """How the applications are, as KubeRay writes it into the status of a RayService."""
        if time.monotonic() - self._told_at_s >= _ASKED_AGAIN_S:
            try:
                found = httpx.get(self._url, timeout=_TAKES_WITHIN_S).raise_for_status().json()
            except httpx.HTTPError:
                return self._told
            self._told = {name: _status(each) for name, each in found["applications"].items()}
            self._told_at_s = time.monotonic()
        return self._told


def _status(application: Json) -> Json:
    deployments = {
        name: {"status": each["status"]} for name, each in application["deployments"].items()
    }
    return {"status": application["status"], "serveDeploymentStatuses": deployments}


def are_running(applications: Json) -> bool:
    """Whether Serve runs every application; none is not enough."""
    return bool(applications) and all(each["status"] == "RUNNING" for each in applications.values())
