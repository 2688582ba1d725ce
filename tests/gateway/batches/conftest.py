"""A batch store of each kind in turn."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.gateway.batches.store import BatchStore

from .kept import KINDS, Kept, kept_in


@pytest.fixture(params=KINDS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    return kept_in(request.param, tmp_path)


@pytest.fixture
def store(kept: Kept) -> Iterator[BatchStore]:
    opened = kept.open()
    yield opened
    opened.close()
