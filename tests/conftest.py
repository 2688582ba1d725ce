"""What holds for every test."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines are shared: how long an example takes says nothing about the code.
settings.register_profile("slicewise", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slicewise")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves alone the files that import vLLM (8 s) when none of their tests would run."""
    if collection_path.suffix != ".py" or "not vllm" not in config.option.markexpr:
        return None
    return True if "\npytestmark = pytest.mark.vllm\n" in collection_path.read_text() else None
