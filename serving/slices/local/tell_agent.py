"""The preStop hook of a slice's host: tells the agent, and holds the pod until the slice is left.

`python -I -m serving.slices.local.tell_agent`, with `SLICEWISE_RUN_DIR` and
`SLICEWISE_END_WITHIN_S` in the environment. It needs no Ray, no head and no network, and imports
nothing but the standard library. Without an agent on the host nobody holds the slice: then it
returns at once, and Ray's node ends by the signal that follows.
"""

import math
import os
import selectors
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from serving.slices.local.notes import END_WITHIN_VARIABLE, LEFT, call_agents, write_note

RUN_DIR_VARIABLE = "SLICEWISE_RUN_DIR"  # as in serving.config.slice_spec, which imports more
NOTE = "pod"
SOURCE = "pod preStop"
# Kubernetes itself allows more; no pod of ours has a longer grace.
MAX_WITHIN_S = 7 * 24 * 3600.0
# An agent that has ended without a word may come again, under another name.
_LOOK_S = 0.25
_UNUSABLE = 2


def main(environment: Mapping[str, str], started_s: float) -> int:
    """Tells and waits; returns the exit status. `started_s` is the wall-clock start of the hook."""
    run_dir = environment.get(RUN_DIR_VARIABLE, "")
    try:
        within_s = _within_s(environment.get(END_WITHIN_VARIABLE, ""))
        if not run_dir:
            raise ValueError(f"{RUN_DIR_VARIABLE} is not set")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return _UNUSABLE
    deadline_s = started_s + within_s
    try:
        write_note(Path(run_dir), NOTE, [_notice(within_s, deadline_s)])
    except OSError as error:
        sys.stderr.write(f"cannot write below {run_dir}: {error}\n")
        return _UNUSABLE
    hold(Path(run_dir), time.monotonic() + deadline_s - time.time())
    return 0


def hold(run_dir: Path, until_s: float) -> None:
    """Returns once every agent of the host has left, at `until_s` (monotonic) at the latest.

    An agent that says nothing holds the pod too: its slice may be in use. So does one that ended
    without a word, until the agent that comes in its place has left.
    """
    known: dict[str, bool] = {}  # whether the agent may still hold the slice
    is_orphaned = False
    with selectors.DefaultSelector() as selector:
        while True:
            for name, connection in call_agents(run_dir, known).items():
                known[name] = True
                selector.register(connection, selectors.EVENT_READ, (name, bytearray()))
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not (is_orphaned or any(known.values())):
                return
            for key, _ in selector.select(min(_LOOK_S, left_s)):
                name, heard = key.data
                try:
                    data = key.fileobj.recv(4096)  # type: ignore[union-attr] # sockets only
                except OSError:
                    data = b""
                heard += data
                if data and LEFT not in heard:
                    del heard[: -len(LEFT)]
                    continue
                known[name] = False
                is_orphaned = LEFT not in heard
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]


def _within_s(text: str) -> float:
    """Returns the value of the variable, in seconds.

    Raises:
        ValueError: it is no time that a pod may have.
    """
    allowed = f"allowed: a number above 0, up to {MAX_WITHIN_S:g}"
    try:
        within_s = float(text)
    except ValueError:
        raise ValueError(f"{END_WITHIN_VARIABLE} is {text!r}; {allowed}") from None
    if not math.isfinite(within_s) or not 0 < within_s <= MAX_WITHIN_S:
        raise ValueError(f"{END_WITHIN_VARIABLE} is {text!r}; {allowed}")
    return within_s


def _notice(within_s: float, deadline_s: float) -> dict[str, object]:
    return {
        "kind": "termination_signal",  # `NoticeKind.TERMINATION_SIGNAL`
        "deadline_s": deadline_s,
        "reason": f"its pod ends within {within_s:g} s",
        "source": SOURCE,
    }


if __name__ == "__main__":
    sys.exit(main(os.environ, time.time()))
