"""Ways to choose an engine that others use, for the trace that `dispatch_trace` replays.

Each knows what it would know in earnest: what its own gateway has sent and has in flight. The
session is the exception: the trace has none, and conversations are told apart by their blocks, as
if each client said which is its own. A request is given to an engine at once, and waits there.
"""

import bisect
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

# What each engine's cache has room for, in blocks of the trace.
CACHE_BLOCKS = 2_000_000 // 512


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: of which conversation, and its prompt's blocks."""

    session: int
    blocks: Sequence[int]


class Baseline(Protocol):
    """One gateway's way to choose."""

    def choose(self, asked: Asked, in_flight: Sequence[int]) -> int:
        """Returns the engine for a request; `in_flight` are its gateway's requests on each."""
        ...


def _fewest(in_flight: Sequence[int]) -> int:
    return min(range(len(in_flight)), key=lambda engine: (in_flight[engine], engine))


@dataclass(slots=True)
class SessionAffinity:
    """A conversation stays on the engine that it began on: the one with the fewest requests."""

    engine_of: dict[int, int] = field(default_factory=dict)

    def choose(self, asked: Asked, in_flight: Sequence[int]) -> int:
        """See `Baseline`."""
        return self.engine_of.setdefault(asked.session, _fewest(in_flight))


@dataclass(slots=True)
class ConsistentHash:
    """By a hash of the session on a ring; past engines that have too much of the load.

    That is `bound` times the mean (consistent hashing with bounded loads). Of 1.25, 1.5, 2 and 4
    the first was best on the first 1,500 requests through four gateways, by the slowest tenth's
    first token: 7.7 s.
    """

    num_engines: int
    bound: float = 1.25
    ring: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        """Gives each engine a hundred places."""
        self.ring = sorted(
            (_place(f"{engine}/{number}"), engine)
            for engine in range(self.num_engines)
            for number in range(100)
        )

    def choose(self, asked: Asked, in_flight: Sequence[int]) -> int:
        """See `Baseline`."""
        most = self.bound * (sum(in_flight) + 1) / self.num_engines
        start = bisect.bisect(self.ring, (_place(str(asked.session)), 0))
        for number in range(len(self.ring)):
            _, engine = self.ring[(start + number) % len(self.ring)]
            if in_flight[engine] + 1 <= max(1.0, most):
                return engine
        return _fewest(in_flight)


def _place(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@dataclass(slots=True)
class PrefixTree:
    """By the longest prefix that this gateway has sent to an engine, if loads are alike.

    The rule of SGLang's router: among engines whose loads differ by no more
    than `most_apart` requests and the factor `most_times`, the one with the longest match, if that
    is more than `least_match` of the prompt, else the one to which least was sent; otherwise the
    one with the fewest requests. Of each engine as much is remembered as its cache has room for.
    """

    num_engines: int
    # The best of six pairs in the same way: 6.8 s. The router's own, 0.5 and 32, gave 9.3 s.
    least_match: float = 0.05
    most_apart: int = 8
    most_times: float = 1.0001
    sent: list[OrderedDict[int, None]] = field(init=False)

    def __post_init__(self) -> None:
        """Remembers nothing yet."""
        self.sent = [OrderedDict() for _ in range(self.num_engines)]

    def choose(self, asked: Asked, in_flight: Sequence[int]) -> int:
        """See `Baseline`."""
        engine = self._chosen(asked.blocks, in_flight)
        sent = self.sent[engine]
        for block in asked.blocks:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > CACHE_BLOCKS:
            sent.popitem(last=False)
        return engine

    def _chosen(self, blocks: Sequence[int], in_flight: Sequence[int]) -> int:
        most, least = max(in_flight), min(in_flight)
        if most - least > self.most_apart and most > self.most_times * least:
            return _fewest(in_flight)
        matches = [num_found(blocks, sent) for sent in self.sent]
        best = max(range(self.num_engines), key=lambda engine: (matches[engine], -engine))
        if matches[best] > self.least_match * len(blocks):
            return best
        return min(range(self.num_engines), key=lambda engine: (len(self.sent[engine]), engine))


def num_found(blocks: Sequence[int], known: "OrderedDict[int, None] | set[int]") -> int:
    """Returns how many of the first blocks are known, up to the first that is not.

    A block of the trace is named by all before it, too.
    """
    return next((at for at, block in enumerate(blocks) if block not in known), len(blocks))


def sessions_of(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Returns the conversation of each request, in their order.

    It is that of the last one with which it shares most, if that is more than every conversation
    begins with: blocks of more than a hundredth of all requests.
    """
    counts = Counter(block for blocks in prompts for block in set(blocks))
    common = {block for block, count in counts.items() if count > len(prompts) / 100}
    session_of_block: dict[int, int] = {}
    sessions = []
    for number, blocks in enumerate(prompts):
        own = [block for block in blocks if block not in common]
        known = [session_of_block[block] for block in own if block in session_of_block]
        session = known[-1] if known else number
        sessions.append(session)
        for block in own:
            session_of_block[block] = session
    return sessions


def pooled_ratio(
    prompts: Sequence[Sequence[int]], tokens: Sequence[int], num_engines: int
) -> float:
    """Returns the share of tokens that one cache of all engines' size would have found.

    It has the last used blocks; each prompt is in it as soon as it has come.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    found = 0
    for blocks, num_tokens in zip(prompts, tokens, strict=True):
        found += min(512 * num_found(blocks, cache), num_tokens - 1)
        for block in blocks:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > num_engines * CACHE_BLOCKS:
            cache.popitem(last=False)
    return found / sum(tokens)


def uncached_at_least(prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[int]:
    """Returns the tokens of each prompt that some engine has to compute, whoever chooses.

    As if one cache without end had every prompt as soon as it came, wherever it was sent.
    """
    seen: set[int] = set()
    left = []
    for blocks, num_tokens in zip(prompts, tokens, strict=True):
        left.append(num_tokens - min(512 * num_found(blocks, seen), num_tokens - 1))
        seen.update(blocks)
    return left
