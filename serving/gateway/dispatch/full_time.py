"""For how much of the last half minute engines had no room while work waited for it. Pure."""

from collections import deque

from serving.gateway.telemetry.request_metrics import WINDOW_S


class FullTime:
    """The times in which no engine took another request, and interactive or standard work waited.

    Times are monotonic, in seconds, and never run backwards.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float]] = deque()  # from when, until when
        self._since_s: float | None = None

    def look(self, now_s: float, *, is_full: bool) -> None:
        """Notes how it is from now on."""
        if is_full and self._since_s is None:
            self._since_s = now_s
        elif not is_full and self._since_s is not None:
            self._ended.append((self._since_s, now_s))
            self._since_s = None
            self._forget(now_s)

    def ratio(self, now_s: float) -> float:
        """Returns the share of the last half minute, 0 to 1."""
        self._forget(now_s)
        begins_s = now_s - WINDOW_S
        full_s = sum(until_s - max(from_s, begins_s) for from_s, until_s in self._ended)
        if self._since_s is not None:
            full_s += now_s - max(self._since_s, begins_s)
        return min(1.0, full_s / WINDOW_S)

    def _forget(self, now_s: float) -> None:
        while self._ended and self._ended[0][1] <= now_s - WINDOW_S:
            self._ended.popleft()
