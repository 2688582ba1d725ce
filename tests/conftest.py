"""What holds for every test."""

import importlib.util
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Takes the time limits from examples: on a shared machine they say nothing about the code."""
    # The environment of tpu-inference does without hypothesis.
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "slicewise", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("slicewise")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves alone the files that import vLLM (8 s) when none of their tests would run."""
    if collection_path.suffix != ".py" or "not vllm" not in config.option.markexpr:
        return None
    return True if "\npytestmark = pytest.mark.vllm\n" in collection_path.read_text() else None
