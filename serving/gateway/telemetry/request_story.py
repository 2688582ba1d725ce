"""Why a request went where it went: what was decided about each of the last ones, for people.

Owns what is kept of a request, and of how many of them. Does not own when something is decided:
`request_telemetry` has a call for each point. Prompts and answers are in no story.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# Of some 2 KB each. At 50 requests a second they are those of the last minute and a half.
MAX_STORIES = 5000
# A request that asks for 128 sequences has several of each: what is left out is counted.
MAX_EVENTS = 48

# What an event says besides its name; JSON takes it as it is.
Fact = str | int | float | bool | None


class Because(StrEnum):
    """What decided that it was this engine, among those that were compared."""

    ONLY_ONE = "only_one"  # no other could have it: of room, drains and suspects
    CACHED = "cached"  # another had no more to do, but less of it cached
    SPREAD = "spread"  # without the wish for one copy more, another would have had it
    LEAST_TO_DO = "least_to_do"  # another one's line of prompts was longer
    FEWEST_IN_FLIGHT = "fewest_in_flight"  # no line was longer, but another had more sequences
    LEAST_USED = "least_used"  # as good as the others
    WAITED = "waited"  # it had waited for this one, though another had room


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine that was chosen, why, and what was known then.

    Of the request's `num_tokens` the gateway expected `expected_cached` in the engine's prefix
    cache; `None` if it knows nothing of that. `line_tokens`, prompts in line, and `num_in_flight`,
    sequences, were there before it.
    """

    because: Because
    num_engines: int
    num_tokens: int = 0
    expected_cached: int | None = None
    line_tokens: int = 0
    num_in_flight: int = 0

    @property
    def reason(self) -> str:
        """Why, in words. Put together only when it is read."""
        match self.because:
            case Because.ONLY_ONE:
                return "no other engine can have it now"
            case Because.CACHED if self.expected_cached is None:
                return "for what it most likely has cached"
            case Because.CACHED:
                return f"for what it has cached ({self.expected_cached} tokens)"
            case Because.SPREAD:
                return "one more copy of a popular beginning"
            case Because.LEAST_TO_DO:
                return (
                    f"least to do there ({self.line_tokens} tokens in line, "
                    f"{self.num_in_flight} sequences)"
                )
            case Because.FEWEST_IN_FLIGHT:
                return f"fewest in flight ({self.num_in_flight})"
            case Because.LEAST_USED:
                return "as good as others, and the least used so far"
            case Because.WAITED:
                return "it waited for this one, where it takes less"

    def facts(self) -> dict[str, Fact]:
        """Returns what a story says of it."""
        return {
            "because": str(self.because),
            "reason": self.reason,
            "engines": self.num_engines,
            "tokens": self.num_tokens,
            "expected_cached_tokens": self.expected_cached,
            "line_tokens": self.line_tokens,
            "in_flight": self.num_in_flight,
        }


@dataclass(slots=True)
class RequestStory:
    """What happened to one HTTP request; `received_at_s` is monotonic, as all times told here."""

    request_id: str
    path: str
    model: str
    tenant: str
    service_class: str
    received_at_s: float
    events: list[dict[str, Fact]] = field(default_factory=list)
    num_left_out: int = 0
    num_sequences: int = 0

    def begin_sequence(self) -> int:
        """Returns the number of the next sequence that the request asks for, from 0 on."""
        self.num_sequences += 1
        return self.num_sequences - 1

    def tell(self, event: str, now_s: float, **facts: Fact) -> None:
        """Notes what happened just now; without effect once there are too many events."""
        if len(self.events) >= MAX_EVENTS:
            self.num_left_out += 1
            return
        self.events.append({"in_s": round(now_s - self.received_at_s, 6), "event": event, **facts})

    def described(self, wall_offset_s: float) -> dict[str, Any]:
        """Returns it as JSON; a time plus `wall_offset_s` is wall-clock time."""
        return {
            "request_id": self.request_id,
            "path": self.path,
            "model": self.model,
            "tenant": self.tenant,
            "service_class": self.service_class,
            "received_at_s": round(self.received_at_s + wall_offset_s, 3),
            "events": list(self.events),
            "events_left_out": self.num_left_out,
        }


class RequestStories:
    """The stories of a gateway's last requests, by the ids that their clients know."""

    def __init__(self, max_stories: int = MAX_STORIES) -> None:
        self._max_stories = max_stories
        self._stories: OrderedDict[str, RequestStory] = OrderedDict()

    def begin(self, story: RequestStory) -> None:
        """Keeps one from now on; of those with one id it is the last that is kept."""
        self._stories.pop(story.request_id, None)
        self._stories[story.request_id] = story
        if len(self._stories) > self._max_stories:
            self._stories.popitem(last=False)

    def describe(self, request_id: str) -> dict[str, Any] | None:
        """Returns one as JSON; `None` if there is none, or none any more."""
        story = self._stories.get(request_id)
        return None if story is None else story.described(time.time() - time.monotonic())
