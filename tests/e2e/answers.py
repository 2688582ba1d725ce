"""What a running application says of itself over HTTP, whoever has started it."""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

_POLL_S = 0.05
# An answer of a second here has taken more than a minute beside two other jobs on slow cores: the
# first one with a grammar also waits for a process that imports vLLM.
ANSWER_TIMEOUT_S = 300.0


class Answers:
    """The application at `base_url`. `api_key` is what its own questions carry."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url = base_url
        self.api_key = api_key

    def fleet(self) -> dict[str, Any]:
        """`/fleet` at this moment."""
        headers = {"Authorization": f"Bearer {self.api_key}"}
        # Plain HTTP: without `verify` every call would read all root certificates anew.
        answer = httpx.get(
            f"{self.base_url}/fleet", headers=headers, timeout=ANSWER_TIMEOUT_S, verify=False
        )
        answer.raise_for_status()
        fleet: dict[str, Any] = answer.json()
        return fleet

    def wait_fleet(
        self, is_so: Callable[[dict[str, Any]], bool], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> dict[str, Any]:
        """Waits until `/fleet` is as wanted; a gateway that is away for a moment is asked again."""
        deadline_s = time.monotonic() + timeout_s
        fleet: dict[str, Any] | None = None
        while True:
            with contextlib.suppress(httpx.HTTPError):
                fleet = self.fleet()
                if is_so(fleet):
                    return fleet
            assert time.monotonic() < deadline_s, f"not so within {timeout_s:g} s: {fleet}"
            time.sleep(_POLL_S)

    def at_each_gateway(
        self,
        number: int,
        look: Callable[[dict[str, Any]], int | None],
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> dict[str, int]:
        """What `look` makes of `/fleet` at each of so many gateways, by their ids.

        Asks until each has answered, and again a gateway of which it makes `None`.
        """
        seen: dict[str, int] = {}

        def have_answered(fleet: dict[str, Any]) -> bool:
            found = look(fleet)
            if found is not None:
                seen[fleet["gateway"]["id"]] = found
            return len(seen) >= number

        self.wait_fleet(have_answered, timeout_s)
        return seen

    def loads(self, num_gateways: int, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, int]:
        """Requests in flight of the first model at each gateway; see `at_each_gateway`."""
        return self.at_each_gateway(
            num_gateways, lambda fleet: int(fleet["models"][0]["in_flight"]), timeout_s
        )

    def wait_idle(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Waits until nothing is in flight anywhere."""
        return self.wait_fleet(is_idle, timeout_s)


def is_idle(fleet: Mapping[str, Any]) -> bool:
    """Whether no request is in flight: in frontends, in the fleet client, on engines."""
    return all(
        model["in_flight"] == model["frontend_in_flight"] == model["waiting"] == 0
        and all(engine.get("num_running", 0) == 0 for engine in model["engines"])
        for model in fleet["models"]
    )
