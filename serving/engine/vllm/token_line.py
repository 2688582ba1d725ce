"""Counts the tokens in line for an engine core, which knows of a request only a moment later."""

from collections.abc import Iterable, Sequence


class TokenLine:
    """The tokens of prompts that the engine core has to compute yet. Pure."""

    def __init__(self) -> None:
        self._begun = 0
        self._waiting = 0
        # Sent since those that the latest report has counted, in that order.
        self._unseen: dict[str, int] = {}

    def submitted(self, request_id: str, num_tokens: int) -> None:
        """Counts a request on its way."""
        self._unseen[request_id] = num_tokens

    def told(self, line: Sequence[int | str] | None) -> None:
        """Takes in what the scheduler tells with a step (`LINE_STATS`); `None` if it told nothing.

        Requests arrive in the order in which they were sent, so with the latest that it knows it
        knows all before, or has refused them.
        """
        if line is None:
            return
        begun, waiting, latest_id = line
        self._begun, self._waiting = int(begun), int(waiting)
        if latest_id in self._unseen:
            for request_id in list(self._unseen):
                del self._unseen[request_id]
                if request_id == latest_id:
                    break

    def ended(self, request_ids: Iterable[str]) -> None:
        """Forgets requests that are over, which the engine core may never have counted."""
        if self._unseen:
            for request_id in request_ids:
                self._unseen.pop(request_id, None)

    def backlog_tokens(self, computed_ratio: float) -> int:
        """Returns the tokens left, of those not begun the share that has to be computed."""
        ahead = self._waiting + sum(self._unseen.values())
        return self._begun + round(ahead * computed_ratio)
