"""What the tests on tpu-inference share: checkpoints, a cache of programs, the table of results."""

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from serving.engine.tpu_sim.replacements import ENABLED_VARIABLE

from .evidence import Evidence
from .tiny_models import TinyModels, make

_PACKAGES = (
    "vllm-tpu", "tpu-inference", "jax", "jaxlib", "flax", "torchax", "torch", "transformers",
    "peft", "ray",
)  # fmt: skip
# Where the run writes its table; `docs/results/tpu-parity.md` is one such file.
_TABLE_VARIABLE = "SLICEWISE_TPU_PARITY_TABLE"


def _is_environment_of_tpu_sim() -> bool:
    try:
        version("vllm-tpu")
    except PackageNotFoundError:
        return False
    return True


if _is_environment_of_tpu_sim():
    # Before vLLM is imported, which is when it chooses its platform.
    os.environ |= {ENABLED_VARIABLE: "1", "JAX_PLATFORMS": "cpu"}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves alone what imports tpu-inference's vLLM where that is not installed."""
    is_test = collection_path.name.startswith("test_")
    return True if is_test and not _is_environment_of_tpu_sim() else None


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return make(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="session")
def evidence(request: pytest.FixtureRequest) -> Iterator[Evidence]:
    """Collects what was seen; written as a page when the session ends, if a place is named."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {name: version(name) for name in _PACKAGES}
    evidence = Evidence(versions | {"Python": platform.python_version()}, commit)
    yield evidence
    target = os.environ.get(_TABLE_VARIABLE)
    if target:
        Path(target).write_text(evidence.as_markdown())
