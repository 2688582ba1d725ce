"""Builds another commit of Slicewise beside this checkout, with an environment of its own lock.

It stays below `.bench` for the next run. Owns the checkout and its environment, not its start.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.side_by_side.errors import BaselineMissingError

FOLDER = ".bench"
_SETUP_TIMEOUT_S = 3600.0
_SHOWN_CHARACTERS = 2000
# They are of the `make` that runs this, and would change what is built there.
_OF_OUTER_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")


def checkout_of(root: Path, commit: str) -> Path:
    """Returns the checkout of `commit` below the checkout `root`; makes it if need be.

    Raises:
        BaselineMissingError: it is not that commit as it was written, or could not be built.
    """
    folder = root / FOLDER / commit
    if not folder.exists():
        _run(["git", "worktree", "add", "--detach", str(folder), commit], root)
    found = _run(["git", "rev-parse", "HEAD"], folder)
    if not found.startswith(commit):
        raise BaselineMissingError(f"{folder} is at {found}, not at {commit}")
    if changed := _run(["git", "status", "--porcelain"], folder):
        raise BaselineMissingError(f"{folder} has changes: {changed}")
    _run(["make", "setup", "VENV=.venv"], folder)
    return folder


def _run(command: Sequence[str], directory: Path) -> str:
    """Runs a command there; what it printed."""
    environment = {k: v for k, v in os.environ.items() if k not in _OF_OUTER_MAKE}
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SETUP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BaselineMissingError(str(error)) from error
    if done.returncode:
        words = f"{' '.join(command)} ended with {done.returncode}"
        raise BaselineMissingError(f"{words}: {done.stdout[-_SHOWN_CHARACTERS:].strip()}")
    return done.stdout.strip()
