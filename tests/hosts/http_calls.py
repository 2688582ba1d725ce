"""HTTP from a host in namespaces, where this process is not.

A program runs on the host and makes the calls; `HttpCalls` speaks to it over its pipes. Run as a
program it is that one: a line of JSON is a list of calls, made at once, and one of replies answers.
"""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from deployments.simulation.hosts.namespaces import Host

_PROGRAM = (sys.executable, "-m", "tests.hosts.http_calls")


@dataclass(frozen=True)
class Call:
    """One call; without a body it is a GET."""

    url: str
    body: dict[str, Any] | None = None
    timeout_s: float = 120.0


@dataclass(frozen=True)
class Reply:
    """What came of it; status 0 and the error where nothing answered."""

    status: int
    text: str

    def json(self) -> Any:
        assert self.status == 200, self
        return json.loads(self.text)


class HttpCalls:
    """Makes calls from one host, until that ends."""

    def __init__(self, host: Host) -> None:
        pipe = subprocess.PIPE
        self._program = host.start(*_PROGRAM, stdin=pipe, stdout=pipe, text=True)

    def make(self, calls: Sequence[Call]) -> list[Reply]:
        """All at once; their replies in the same order."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps([asdict(call) for call in calls]) + "\n")
        self._program.stdin.flush()
        return [Reply(**reply) for reply in json.loads(self._program.stdout.readline())]

    def get(self, url: str) -> Reply:
        return self.make([Call(url, timeout_s=5.0)])[0]


# -- what follows runs in that program --


def _reply(call: Call) -> Reply:
    data = None if call.body is None else json.dumps(call.body).encode()
    request = urllib.request.Request(call.url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=call.timeout_s) as answer:
            return Reply(answer.status, answer.read().decode())
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.read().decode(errors="replace"))
    except OSError as error:
        return Reply(0, repr(error))


def _main() -> None:
    for line in sys.stdin:
        calls = [Call(**call) for call in json.loads(line)]
        with ThreadPoolExecutor(len(calls)) as threads:
            replies = list(threads.map(_reply, calls))
        print(json.dumps([asdict(reply) for reply in replies]), flush=True)  # noqa: T201 - its answer


if __name__ == "__main__":
    _main()
