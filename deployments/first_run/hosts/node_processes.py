"""Finds the processes of one application on this host, by what Ray has given each of them."""

import contextlib
import os
from collections.abc import Iterator

import psutil

# In a task of Ray: the processes of the task's own node.
OF_THIS_NODE = "-"
# What Ray gives each process of a node, and those that they start: the number of its raylet.
_NODE = "RAY_RAYLET_PID"
_FOLDER = "RAY_TMPDIR"


def processes_of_place(place: str, title: str = "") -> Iterator[psutil.Process]:
    """Yields the processes of one place whose title begins with `title`.

    `place` is what the Ray folder of their cluster begins with, or `OF_THIS_NODE`: then they have
    to be of the same Ray node as this task, so that no other cluster on the machine is hit.

    Raises:
        KeyError: it is `OF_THIS_NODE`, and this is no task of Ray.
    """
    node = os.environ[_NODE] if place == OF_THIS_NODE else None
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if title and not " ".join(process.cmdline()).startswith(title):
                continue
            environment = process.environ()
            if node is not None:
                is_there = environment.get(_NODE) == node
            else:
                is_there = environment.get(_FOLDER, "").startswith(place)
            if is_there:
                yield process
