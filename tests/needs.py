"""What tests need beside most packages: `pytest.mark.needs("prometheus")`, and what is said.

Where it is missing a test is skipped and says how to get it. With `CI=true`, as `.ci/run` sets it,
the test fails: what never runs proves nothing. Only reference data that carries no licence is read
where it is present and skipped elsewhere, in continuous integration too.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
CRDS = ROOT.parent / "shared" / "data" / "crds"
# Not among this environment's packages: vLLM takes a machine that has it for a TPU host.
LIBTPU = Path(sys.prefix) / "libtpu"

# Programs of which one has to be there, and who brings it; a test may need several of these.
_PROGRAMS = {
    "chromedriver": (("chromedriver",), "Debian's chromium-driver"),
    "chromium": (("chromium", "google-chrome"), "Debian's chromium"),
    "hadolint": (("hadolint",), "requirements/dev.lock"),
    "ip": (("ip",), "Debian's iproute2"),
    "prometheus": (("prometheus",), "Debian's prometheus"),
    "promtool": (("promtool",), "Debian's prometheus"),
    "redis-server": (("redis-server",), "Debian's redis-server"),
    "unshare": (("unshare",), "Debian's util-linux"),
    "useradd": (("useradd",), "Debian's passwd"),
}
_FOLDERS = {
    "crds": (CRDS, "these CRDs lie beside the repository"),
    "libtpu": (LIBTPU, "`make setup-dev` installs requirements/libtpu.lock there"),
}
# Packages that are large, and few tests import.
_PACKAGES = {"schemathesis": "`make setup-dev` installs requirements/dev.lock"}


def program(name: str) -> str | None:
    """Where a program is: beside this Python, as locked packages bring it, or on the PATH."""
    names, _ = _PROGRAMS[name]
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return next(filter(None, (shutil.which(each, path=beside) for each in names)), None)


def missing(name: str) -> str | None:
    """What is missing and how to get it; `None` if it is there.

    Raises:
        KeyError: nobody knows the name: add it above.
    """
    if name in _FOLDERS:
        folder, how = _FOLDERS[name]
        return None if folder.is_dir() else f"there is no {folder}: {how}"
    if name in _PACKAGES:
        found = importlib.util.find_spec(name) is not None
        return None if found else f"{name} is not installed: {_PACKAGES[name]}"
    _, how = _PROGRAMS[name]
    return None if program(name) else f"{name} is not installed: {how}"


def do_without(reason: str, environment: Mapping[str, str] = os.environ) -> NoReturn:
    """Skips the test with the reason; in continuous integration nothing is skipped in silence."""
    if environment.get("CI") == "true":
        pytest.fail(f"CI=true, and {reason}", pytrace=False)
    pytest.skip(reason)
