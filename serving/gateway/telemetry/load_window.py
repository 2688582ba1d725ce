"""What one model's load at one gateway was in the last half minute.

Owns the counts of what arrived and what finished, second by second. Does not own what waits or is
in flight (`fleet_core`), nor who is told (`deployment`). Pure: callers pass the time, monotonic.
"""

from collections import deque
from dataclasses import dataclass

from serving.domain.load_report import LoadSample

# Long enough that a rate of one request in some seconds is seen, short enough to follow a step.
WINDOW_S = 30.0
# A gateway that has just started divides by no less: one early request is no surge.
_MIN_ELAPSED_S = 5.0


@dataclass(slots=True)
class _Second:
    """What happened in one second, from `at_s` on."""

    at_s: float
    num_arrived: int = 0
    num_prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_finished: int = 0
    output_tokens: int = 0


class LoadMeter:
    """Counts. An arrival is counted once: at the door where it has to wait there, else inside."""

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._seconds: deque[_Second] = deque()
        self._input_mean: float | None = None
        self._output_mean: float | None = None
        # Counted at the door and let in, but not yet seen inside.
        self._num_counted = 0
        self._let_in_at_s = started_at_s

    def knocked(self, now_s: float) -> None:
        """A request found no engine; it waits at the door or is turned away."""
        self._second(now_s).num_arrived += 1

    def let_in(self, now_s: float) -> None:
        """One that had knocked goes in: it will arrive, and must not be counted again."""
        self._num_counted += 1
        self._let_in_at_s = now_s

    def arrived(self, now_s: float, prompt_tokens: int) -> None:
        """A sequence to generate was taken in."""
        second = self._second(now_s)
        second.num_prompts += 1
        second.prompt_tokens += prompt_tokens
        if now_s - self._let_in_at_s > WINDOW_S:
            self._num_counted = 0  # those were refused inside, or their clients left
        if self._num_counted:
            self._num_counted -= 1
        else:
            second.num_arrived += 1

    def found_cached(self, now_s: float, tokens: int) -> None:
        """An engine did not have to compute so many tokens of a prompt."""
        self._second(now_s).cached_tokens += tokens

    def finished(self, now_s: float, output_tokens: int) -> None:
        """A sequence ended after so many tokens, by itself or by its client."""
        second = self._second(now_s)
        second.num_finished += 1
        second.output_tokens += output_tokens

    def sample(
        self, now_s: float, *, num_waiting: int, oldest_wait_s: float, num_in_flight: int
    ) -> LoadSample:
        """The load as it is now, with what others count."""
        self._drop_old(now_s)
        elapsed_s = min(WINDOW_S, max(_MIN_ELAPSED_S, now_s - self._started_at_s))
        num_prompts = sum(each.num_prompts for each in self._seconds)
        num_finished = sum(each.num_finished for each in self._seconds)
        if num_prompts:
            tokens = sum(each.prompt_tokens - each.cached_tokens for each in self._seconds)
            # Cached tokens are known later than their prompt, which may have left the window.
            self._input_mean = max(0, tokens) / num_prompts
        if num_finished:
            self._output_mean = sum(each.output_tokens for each in self._seconds) / num_finished
        return LoadSample(
            requests_per_s=sum(each.num_arrived for each in self._seconds) / elapsed_s,
            num_waiting=num_waiting,
            oldest_wait_s=oldest_wait_s,
            num_in_flight=num_in_flight,
            input_tokens_mean=self._input_mean,
            output_tokens_mean=self._output_mean,
        )

    def _second(self, now_s: float) -> _Second:
        if not self._seconds or now_s - self._seconds[-1].at_s >= 1.0:
            self._seconds.append(_Second(now_s))
            self._drop_old(now_s)
        return self._seconds[-1]

    def _drop_old(self, now_s: float) -> None:
        while self._seconds and self._seconds[0].at_s <= now_s - WINDOW_S:
            self._seconds.popleft()
