"""Computes how many output tokens had arrived by when. Pure.

A record holds the instants of a request's first and last token and how many there were; those
between are taken to be evenly spread. Only whole answers count, by the server's usage.
"""

from collections.abc import Iterable

import numpy as np

from loadtest.records import RequestRecord


class TokenFlow:
    """The output tokens of some requests over time."""

    def __init__(self, requests: Iterable[RequestRecord]) -> None:
        rows = [
            (request.first_s, request.last_s, request.output_tokens)
            for request in requests
            if request.is_ok
            and request.first_s is not None
            and request.last_s is not None
            and request.output_tokens
        ]
        table = np.array(rows, dtype=float).reshape(len(rows), 3)
        self._first_s, self._last_s, self._tokens = table.T
        self.is_empty = not rows

    def received_by(self, at_s: float) -> float:
        """Returns the tokens that had arrived at `at_s`, that instant included."""
        length_s = self._last_s - self._first_s
        passed = np.divide(
            at_s - self._first_s, length_s, out=np.ones_like(length_s), where=length_s > 0
        )
        later = (self._tokens - 1) * np.clip(passed, 0.0, 1.0)
        return float(np.sum(np.where(at_s >= self._first_s, 1 + later, 0.0)))

    def received_in(self, from_s: float, until_s: float) -> float:
        """Returns the tokens that arrived after `from_s`, up to `until_s`."""
        return self.received_by(until_s) - self.received_by(from_s)
