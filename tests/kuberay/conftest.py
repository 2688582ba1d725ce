"""What the tests of the emulation share."""

import logging

import pytest


@pytest.fixture(autouse=True, scope="session")
def _quiet_http() -> None:
    """The log of these tests is their record of what was measured: no line for every request."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
