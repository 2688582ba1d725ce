"""What the tests of the emulation share."""

import logging
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves alone the files that import Ray (2 s) when none of their tests would run."""
    if collection_path.suffix != ".py" or "not e2e" not in config.option.markexpr:
        return None
    return True if "\npytestmark = [pytest.mark.e2e," in collection_path.read_text() else None


@pytest.fixture(autouse=True, scope="session")
def _quiet_http() -> None:
    """The log of these tests is their record of what was measured: no line for every request."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
