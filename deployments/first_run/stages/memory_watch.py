"""Watches on all hosts what an application takes of their memory while it starts, and judges it.

Owns the thread that asks. A start that fails may leave no process to be asked, so what was seen
before counts too.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from deployments.first_run.hosts.reach import (
    PYTHON,
    HostAnswer,
    HostsUnreachableError,
    RunHosts,
)
from deployments.first_run.results import Measurement

_PROGRAM = (PYTHON, "-m", "deployments.first_run.hosts.memory_here")
_ASKED_S = 15.0
# Each process tells its own most, so that nothing is missed in between but of those that ended.
_TURN_S = 10.0
# Beyond it a larger batch or a longer prompt may end the process.
_MOST_MEMORY_RATIO = 0.8


@dataclass(frozen=True, slots=True)
class SeenMemory:
    """The most that was seen of all processes on one host, and what they may take, in bytes."""

    most_bytes: int
    limit_bytes: int


class MemoryWatch:
    """Asks again and again, from the beginning to `end`."""

    def __init__(self, hosts: RunHosts, place: str, turn_s: float = _TURN_S) -> None:
        """Begins. `place` is as `processes_of_place` has it."""
        self._hosts = hosts
        self._place = place
        self._turn_s = turn_s
        self._seen: dict[str, SeenMemory] = {}
        self._unseen: dict[str, str] = {}
        self._unreachable: str | None = None
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)
        self._thread.start()

    def end(self, until_s: float) -> list[Measurement]:
        """Has all hosts asked once more, until `until_s` (monotonic), and returns what was seen."""
        self._is_ending.set()
        self._thread.join(max(0.0, until_s - time.monotonic()))
        return memory_measurements(dict(self._seen), dict(self._unseen), self._unreachable)

    def _watch(self) -> None:
        while not self._is_ending.wait(self._turn_s):
            self._ask()
        self._ask()

    def _ask(self) -> None:
        try:
            answers = self._hosts.run((*_PROGRAM, self._place), _ASKED_S)
        except HostsUnreachableError as error:
            self._unreachable = f"{error}"
            return
        for answer in answers:
            self._take(answer)

    def _take(self, answer: HostAnswer) -> None:
        told = answer.last_json()
        if told is None or not told["processes"]:
            words = answer.complaint() if told is None else "no process of the application"
            self._unseen[answer.host] = words
            return
        before = self._seen.get(answer.host)
        most_bytes = max(told["most_bytes"], 0 if before is None else before.most_bytes)
        self._seen[answer.host] = SeenMemory(most_bytes, told["limit_bytes"])


def memory_measurements(
    seen: Mapping[str, SeenMemory], unseen: Mapping[str, str], unreachable: str | None
) -> list[Measurement]:
    """Returns the memory of each host; what nobody could tell is said, and not judged. Pure.

    `unseen` has why a host could not tell, and counts where it never did; `unreachable` is why no
    host could be asked.
    """
    what = "most resident memory of all processes"
    found = []
    for host, memory in sorted(seen.items()):
        ratio = memory.most_bytes / memory.limit_bytes
        found.append(
            Measurement(
                f"{what} on {host}",
                f"below {_MOST_MEMORY_RATIO:.0%} of {memory.limit_bytes / 2**30:.0f} GiB",
                f"{memory.most_bytes / 2**30:.1f} GiB",
                is_met=ratio < _MOST_MEMORY_RATIO,
            )
        )
    found += [
        Measurement(f"{what} on {host}", "", f"not measured: {words}")
        for host, words in sorted(unseen.items())
        if host not in seen
    ]
    words = unreachable or "no host has answered in time"
    return found or [Measurement(what, "", f"not measured: {words}")]
