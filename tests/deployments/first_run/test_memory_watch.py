"""The memory of a start is judged on each host, and said to be not measured where it was not."""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from deployments.first_run.hosts.node_processes import OF_THIS_NODE
from deployments.first_run.hosts.reach import HostAnswer, HostsUnreachableError
from deployments.first_run.stages.memory_watch import (
    MemoryWatch,
    SeenMemory,
    memory_measurements,
)
from deployments.first_run.stages.starts import found_in_cache
from serving.domain.topology import GIB

DEADLINE_S = 30.0


def told(host: str, num_processes: int, most_gib: float, limit_gib: float = 100) -> HostAnswer:
    output = {
        "processes": num_processes,
        "most_bytes": int(most_gib * GIB),
        "limit_bytes": int(limit_gib * GIB),
    }
    return HostAnswer(host, 0, json.dumps(output), "")


class RecordedHosts:
    """Hosts that give these answers, one after the other, and then the last for ever."""

    def __init__(self, *answers: list[HostAnswer] | str) -> None:
        self._answers = list(answers)
        self.programs: list[tuple[str, ...]] = []
        self.are_over = threading.Event()

    def run(
        self,
        program: Sequence[str],
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        host: str | None = None,
    ) -> list[HostAnswer]:
        del timeout_s, environment, host
        self.programs.append(tuple(program))
        answer = self._answers[0]
        if len(self._answers) > 1:
            self._answers.pop(0)
        else:
            self.are_over.set()
        if isinstance(answer, str):
            raise HostsUnreachableError(answer)
        return answer


def watched(*answers: list[HostAnswer] | str) -> Iterator[tuple[str, str, str, bool | None]]:
    hosts = RecordedHosts(*answers)
    watch = MemoryWatch(hosts, OF_THIS_NODE, turn_s=0.001)
    assert hosts.are_over.wait(DEADLINE_S)
    for each in watch.end(time.monotonic() + DEADLINE_S):
        yield each.what, each.expected, each.measured, each.is_met
    assert all(program[-1] == OF_THIS_NODE for program in hosts.programs)


def test_most_of_each_host_is_judged_by_its_own_limit() -> None:
    found = list(
        watched(
            [told("a", 3, 50), told("b", 3, 9, 10)],
            [told("a", 3, 70), told("b", 3, 1, 10)],
            [told("a", 3, 60), told("b", 3, 1, 10)],
        )
    )
    what = "most resident memory of all processes on"
    assert found == [
        (f"{what} a", "below 80% of 100 GiB", "70.0 GiB", True),
        (f"{what} b", "below 80% of 10 GiB", "9.0 GiB", False),
    ]


def test_what_was_seen_before_its_processes_ended_counts() -> None:
    (found,) = watched([told("a", 3, 90)], [told("a", 0, 0)], "Ray is away")
    assert found[2:] == ("90.0 GiB", False)


def test_hosts_that_cannot_be_asked_are_not_judged() -> None:
    (found,) = watched("Ray is away")
    assert found == (
        "most resident memory of all processes",
        "",
        "not measured: Ray is away",
        None,
    )


def test_host_that_cannot_tell_is_named_beside_those_that_can() -> None:
    broken = HostAnswer("b", 1, "", "KeyError: 'RAY_RAYLET_PID'\n")
    ended = HostAnswer("c", None, "", "")
    found = list(watched([told("a", 1, 1), broken, ended, told("d", 0, 0)]))
    assert [each[2:] for each in found] == [
        ("1.0 GiB", True),
        ("not measured: status 1: KeyError: 'RAY_RAYLET_PID'", None),
        ("not measured: not in time: it said nothing", None),
        ("not measured: no process of the application", None),
    ]


def test_hosts_that_did_not_answer_in_time_are_not_judged() -> None:
    hosts = RecordedHosts([told("a", 1, 1)])
    watch = MemoryWatch(hosts, OF_THIS_NODE, turn_s=DEADLINE_S)
    assert [each.is_met for each in watch.end(time.monotonic() + DEADLINE_S)] == [True]
    (found,) = memory_measurements({}, {}, None)
    assert (found.measured, found.is_met) == ("not measured: no host has answered in time", None)


def test_exactly_at_the_limit_is_too_much() -> None:
    (found,) = memory_measurements({"a": SeenMemory(8, 10)}, {}, None)
    assert found.is_met is False


def test_programs_of_a_warm_start_are_judged_where_there_is_a_cache() -> None:
    def judged(*counts: float | None, has_cache: bool) -> list[tuple[str, bool | None]]:
        found, compiled = counts
        return [
            (each.measured, each.is_met)
            for each in found_in_cache(found, compiled, has_cache=has_cache)
        ]

    assert judged(90, 10, has_cache=True) == [("90% of 100", True)]
    assert judged(89, 11, has_cache=True) == [("89% of 100", False)]
    assert judged(89, 11, has_cache=False) == [("89% of 100", None)]
    assert judged(0, 0, has_cache=True) == [("none was needed", None)]
    assert judged(None, None, has_cache=True) == [("not told", False)]
    assert judged(None, None, has_cache=False) == []
