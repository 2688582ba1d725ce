"""Applications that end-to-end tests share: starting one takes a minute, so each starts once."""

import json
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deployments.start.ports import free_ports

from .application import RunningApplication, StartError, application_args, demo_model, paced_model
from .several_models import (
    KEYS,
    PAGE,
    adapted_model,
    embedding_model,
    key_records,
    write_adapter,
)

# In this order, so that each is started once and ended before the next one needs its memory.
SHARED = ("demo_application", "keyed_application", "operated_application")


class Damage(IntEnum):
    """What a module's tests leave of a shared application: `LEAVES_IT_DAMAGED`, in this order."""

    NONE = 0
    ENGINES_TO_COME = 1
    OTHER_OPTIONS = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests of one shared application side by side; all else stays where it is."""
    here = Path(__file__).parent
    places = [at for at, item in enumerate(items) if here in item.path.parents]
    ours = sorted((items[at] for at in places), key=_rank)
    for at, item in zip(places, ours, strict=True):
        items[at] = item


def _rank(item: pytest.Item) -> tuple[int, Damage]:
    names = getattr(item, "fixturenames", ())
    rank = next((rank for rank, name in enumerate(SHARED) if name in names), len(SHARED))
    damage = getattr(getattr(item, "module", None), "LEAVES_IT_DAMAGED", Damage.NONE)
    return rank, damage if rank < len(SHARED) else Damage.NONE


class SharedApplications:
    """At most one application that outlives a module."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._running: RunningApplication | None = None
        self._failed: dict[str, StartError] = {}

    def get(self, name: str, build: Callable[[], RunningApplication]) -> RunningApplication:
        """The application `name`; started, in place of another one, when it is not the present.

        Raises:
            StartError: it did not become ready, now or when it was asked for before.
        """
        if name in self._failed:
            raise self._failed[name]
        if self._running is None or self._name != name:
            self.stop()
            try:
                self._name, self._running = name, build().__enter__()
            except StartError as error:
                # Once is enough: each attempt takes minutes, and each test that shares it fails.
                self._failed[name] = error
                raise
        return self._running

    def stop(self) -> None:
        """Ends the present one."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()


@pytest.fixture(scope="session")
def shared_applications() -> Iterator[SharedApplications]:
    shared = SharedApplications()
    yield shared
    shared.stop()


@pytest.fixture(scope="module")
def demo_application(shared_applications: SharedApplications) -> RunningApplication:
    """The shipped model on two vLLM engines. Tests that share it leave it as they found it."""
    args = application_args(demo_model())
    return shared_applications.get("demo", lambda: RunningApplication(args))


@pytest.fixture(scope="module")
def keyed_application(
    shared_applications: SharedApplications, tmp_path_factory: pytest.TempPathFactory
) -> RunningApplication:
    """Three models behind API keys from a file: a paced one, one with an adapter, an embedder."""

    def build() -> RunningApplication:
        folder = tmp_path_factory.mktemp("keyed")
        keys_file = folder / "keys.yaml"
        keys_file.write_text(key_records())
        adapter = write_adapter(folder / "adapter")
        args = application_args(
            paced_model(1),
            adapted_model(adapter),
            embedding_model(),
            auth={"keys_file": str(keys_file)},
            gateway={"separate_tenants": True, "cors_origins": [PAGE]},
        )
        return RunningApplication(args, api_key=KEYS[0])

    return shared_applications.get("keyed", build)


OPERATOR_KEY = "sk-operations-0123456789"
# The key of a tenant that may ask so often in a day.
QUOTA_KEY, QUOTA_REQUESTS = "sk-limited-0123456789", 5
OPERATED_KEYS = [
    {"name": "operator", "key": OPERATOR_KEY, "scopes": ["inference", "metrics", "fleet"]},
    {
        "name": "limited",
        "key": QUOTA_KEY,
        "tenant": "limited",
        "quotas": [{"requests": QUOTA_REQUESTS, "per": "day"}],
    },
]


def operated_args(**gateway: Any) -> dict[str, Any]:
    """Two paced engines and two gateways behind keys from an environment variable."""
    return application_args(
        paced_model(2, {"ttft_ms": 10, "tpot_ms": 10}),
        auth={"keys_env": "OPERATIONS_KEYS"},
        gateway={
            "replicas": 2,
            "num_cpus": 0.01,
            "request_deadline_s": 2.0,
            "metrics_port": _metrics_port(),
            **gateway,
        },
    )


@cache
def _metrics_port() -> int:
    """The first of the ports for gateways' own pages; the same whoever asks."""
    return free_ports(4)[0]


@pytest.fixture(scope="module")
def operated_application(shared_applications: SharedApplications) -> RunningApplication:
    """What an operator updates and what loses gateways."""
    environment = {"OPERATIONS_KEYS": json.dumps({"keys": OPERATED_KEYS})}
    return shared_applications.get(
        "operated",
        lambda: RunningApplication(operated_args(), environment=environment, api_key=OPERATOR_KEY),
    )


@pytest.fixture(scope="module")
def paced_application(request: pytest.FixtureRequest) -> Iterator[RunningApplication]:
    """Two paced engines; a module of its own gets an application of its own.

    A module that needs other `args` names them: `pytestmark = pytest.mark.parametrize(
    "paced_application", [args], indirect=True)`.
    """
    args: dict[str, Any] = getattr(request, "param", None) or application_args(paced_model(2))
    with RunningApplication(args) as application:
        yield application
