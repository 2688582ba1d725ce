"""What holds for every test."""

import atexit
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.needs import do_without, missing
from tests.unselected import module_markers, selects_nothing

_STATUS = pytest.StashKey[int]()


def pytest_configure() -> None:
    """Takes the time limits from examples: on a shared machine they say nothing about the code."""
    # The environment of tpu-inference does without hypothesis.
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "slicewise", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("quick", settings.get_profile("slicewise"), max_examples=10)
    settings.load_profile("slicewise")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves alone the files of which `-m` selects nothing: some import vLLM (8 s) or Ray (2 s)."""
    expression: str = config.option.markexpr
    if collection_path.suffix != ".py" or not expression:
        return None
    markers = module_markers(collection_path.read_text())
    declared = (line.partition(":")[0].strip() for line in config.getini("markers"))
    return True if selects_nothing(expression, markers, frozenset(declared)) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Does without a test that needs what is not here."""
    for marker in item.iter_markers("needs"):
        for reason in filter(None, map(missing, marker.args)):
            do_without(reason)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Any]:
    """A `control_plane.server.ControlPlane`: one for all tests of a process that ask for it."""
    from control_plane.shared import shared_control_plane

    with shared_control_plane() as running:
        yield running


@pytest.fixture(scope="session")
def webhook(control_plane: Any) -> Iterator[Any]:
    """A `kuberay.webhook_server.Webhook` in that control plane: the emulated TPU webhook."""
    from kuberay.webhook_server import Webhook

    with Webhook(control_plane) as running:
        yield running


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keeps the result for the end of the process."""
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the process where the result is known, without taking the interpreter down.

    Ray, torch and vLLM leave threads of their own behind. One of them crashed a run in which all
    tests had passed, seconds after its summary, while Python took down what it ran on (signal 11 in
    one of four whole runs, 2026-11-22). What was registered for the end is done before.
    """
    status = config.stash.get(_STATUS, None)
    if status is None:  # it ended before there were tests
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
