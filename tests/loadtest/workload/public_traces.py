"""Where the public traces lie on a developer's machine; tests that want one skip without it."""

from pathlib import Path

import pytest

_TRACES = Path(__file__).parents[3] / "../shared/data/traces"


def public_trace(name: str) -> Path:
    path = _TRACES / name
    if not path.exists():
        pytest.skip(f"the public trace {name} is not on this machine")
    return path
