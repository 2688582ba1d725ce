"""Decides which tokens of a request wait for more, and joins those that leave together.

Owns the order of a request's outputs between the dispatcher and the frontend: none is lost, doubled
or overtaken. Does not own how long tokens wait (`pace`), nor the timer (`hold`). Pure: no clock, no
I/O, no vLLM.

An output that carries tokens only and does not end its request is *plain*. Plain outputs of one
request are joined, and the one that ends it takes in what is before it. An output with more
(logprobs, statistics of the first step) is of one step and stays as it came.
"""

from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

from serving.link.messages import TokenOutput

# Whatever the caller has to know an output by; it is handed back with it.
_Owner = TypeVar("_Owner")


class TokenMerge(Generic[_Owner]):
    """Holds the outputs of many requests until the frontend takes them."""

    def __init__(self) -> None:
        self._ready: list[tuple[_Owner, TokenOutput]] = []
        # Of each request the last of its outputs in `_ready`, if it is plain.
        self._open: dict[str, TokenOutput] = {}
        self._held: dict[str, tuple[_Owner, TokenOutput]] = {}
        # Requests whose tokens may be held, and whether their first one has gone.
        self._may_hold: dict[str, bool] = {}
        self._gone: set[str] = set()
        self.ready_since_s: float | None = None  # `None`: nothing is ready

    @property
    def has_held(self) -> bool:
        """True if tokens wait to be released."""
        return bool(self._held)

    @property
    def has_ready(self) -> bool:
        """True if the frontend can take something."""
        return bool(self._ready)

    def allow_hold(self, request_id: str) -> None:
        """Lets the tokens of a request be held, from its second output on."""
        self._may_hold[request_id] = False

    def take(
        self, outputs: Iterable[tuple[_Owner, TokenOutput]], now_s: float, *, holds: bool
    ) -> None:
        """Takes one step of an engine; plain outputs wait if it `holds`.

        The first tokens of a request and its end never wait. What has been held of a request goes
        before whatever follows it.
        """
        for pair in outputs:
            output = pair[1]
            request_id = output.request_id
            is_plain = output.finish is None and output.payload is None
            held = self._held.get(request_id)
            if held is not None:
                if is_plain:
                    held[1].token_ids += output.token_ids
                    continue
                del self._held[request_id]
                self._make_ready(held)
            elif holds and is_plain and self._may_hold.get(request_id):
                self._held[request_id] = pair
                continue
            self._make_ready(pair)
            if output.finish is not None:
                self._may_hold.pop(request_id, None)
            elif output.token_ids and request_id in self._may_hold:
                self._may_hold[request_id] = True
        self._note_ready(now_s)

    def release(self, now_s: float) -> list[_Owner]:
        """Makes everything ready that has been held; returns its owners."""
        released = list(self._held.values())
        self._held.clear()
        for pair in released:
            self._make_ready(pair)
        self._note_ready(now_s)
        return [owner for owner, _ in released]

    def drain(self) -> list[tuple[_Owner, TokenOutput]]:
        """Returns what is ready: of a request one output, or more if some cannot be joined."""
        ready, self._ready = self._ready, []
        self._open.clear()
        self.ready_since_s = None
        gone, self._gone = self._gone, set()
        return [
            (owner, output)
            for owner, output in ready
            if output.request_id not in gone and not _says_nothing(output)
        ]

    def num_waiting(self, request_id: str) -> int:
        """Returns how many tokens of a request `withdraw` would return."""
        ready, held = self._open.get(request_id), self._held.get(request_id)
        num_ready = 0 if ready is None else len(ready.token_ids)
        return num_ready + (0 if held is None else len(held[1].token_ids))

    def withdraw(self, request_id: str) -> list[int]:
        """Takes the last plain tokens of a request back, which are ready or held.

        What is ready before them stays: an output with more than tokens.
        """
        token_ids: list[int] = []
        if (ready := self._open.pop(request_id, None)) is not None:
            token_ids, ready.token_ids = ready.token_ids, []
        if (held := self._held.pop(request_id, None)) is not None:
            token_ids += held[1].token_ids
        return token_ids

    def flush(self, request_ids: Collection[str]) -> list[tuple[_Owner, TokenOutput]]:
        """Returns all that is left of requests that fail, in order, and forgets them."""
        held = [self._held[each] for each in request_ids if each in self._held]
        for pair in held:
            self._make_ready(pair)
        wanted = set(request_ids) - self._gone
        left = [pair for pair in self._ready if pair[1].request_id in wanted]
        self.forget(request_ids)
        return left

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops all that is left of these requests. Unknown ids are ignored."""
        for request_id in request_ids:
            self._may_hold.pop(request_id, None)
            self._held.pop(request_id, None)
            self._open.pop(request_id, None)
            if self._ready:
                self._gone.add(request_id)

    def _make_ready(self, pair: tuple[_Owner, TokenOutput]) -> None:
        output = pair[1]
        before = self._open.get(output.request_id)
        if before is not None and output.payload is None:
            before.token_ids += output.token_ids
            if output.finish is not None:
                before.finish, before.stop_reason = output.finish, output.stop_reason
                del self._open[output.request_id]
            return
        self._ready.append(pair)
        if output.finish is None and output.payload is None:
            self._open[output.request_id] = output
        elif before is not None:
            del self._open[output.request_id]

    def _note_ready(self, now_s: float) -> None:
        if self._ready and self.ready_since_s is None:
            self.ready_since_s = now_s


def _says_nothing(output: TokenOutput) -> bool:
    """Returns whether neither tokens nor anything else are left in an output."""
    return not output.token_ids and output.finish is None and output.payload is None
