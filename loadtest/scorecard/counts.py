"""Counts a run's requests: outcomes, tokens, wrong answers, groups. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loadtest.records import RequestRecord
from loadtest.scorecard.latency import tpot_s, ttft_scheduled_s
from loadtest.scorecard.spread import Spread, spread_of

MISSING = "missing"  # the kind of failure of a scheduled request that left no record


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """The judged requests. `total` is `ok` and `failed`; `missing` are among the failed.

    `errors` counts the failed by kind. `retried` requests were sent more than once, `retries` times
    in all. `warmup` requests are not judged.
    """

    total: int
    ok: int
    failed: int
    missing: int
    retried: int
    retries: int
    warmup: int
    errors: dict[str, int]

    @property
    def error_ratio(self) -> float | None:
        """The share that failed; `None` of none."""
        return self.failed / self.total if self.total else None


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens of whole answers, by the server's usage; `None` where it reported nothing.

    `cached` are input tokens out of a prefix cache. The counts below state for how many answers the
    usage disagrees: with what was planned, with the number of events that carried tokens (an event
    may carry several), and how many came without any usage.
    """

    input: int | None
    output: int | None
    cached: int | None
    planned_input: int
    planned_output: int
    chunks: int
    input_unlike_planned: int
    output_unlike_planned: int
    output_unlike_chunks: int
    without_usage: int


@dataclass(frozen=True, slots=True)
class Correctness:
    """The answers that were compared with the known ones; the tokens are `None` when none was."""

    checked: int
    lost_tokens: int | None
    repeated_tokens: int | None
    foreign_tokens: int | None


@dataclass(frozen=True, slots=True)
class Group:
    """The judged requests of one model, tenant or priority; missing ones belong to none."""

    name: str
    total: int
    failed: int
    ttft_scheduled_s: Spread
    tpot_s: Spread
    output_tokens: int | None


def count_requests(
    judged: Sequence[RequestRecord], num_missing: int, num_warmup: int
) -> RequestCounts:
    """Counts outcomes of the judged requests and of those that left no record."""
    errors = Counter(request.error for request in judged if request.error is not None)
    if num_missing:
        errors[MISSING] = num_missing
    ok = sum(request.is_ok for request in judged)
    return RequestCounts(
        total=len(judged) + num_missing,
        ok=ok,
        failed=len(judged) - ok + num_missing,
        missing=num_missing,
        retried=sum(request.attempts > 1 for request in judged),
        retries=sum(request.attempts - 1 for request in judged),
        warmup=num_warmup,
        errors=dict(errors.most_common()),
    )


def count_tokens(judged: Iterable[RequestRecord]) -> TokenCounts:
    """Counts the tokens of the whole answers among `judged`, cross-checked."""
    whole = [request for request in judged if request.is_ok]
    with_usage = [request for request in whole if request.output_tokens is not None]
    return TokenCounts(
        input=_sum(request.input_tokens for request in whole),
        output=_sum(request.output_tokens for request in whole),
        cached=_sum(request.cached_tokens for request in whole),
        planned_input=sum(request.planned_input_tokens for request in whole),
        planned_output=sum(request.planned_output_tokens for request in whole),
        chunks=sum(request.num_chunks for request in whole),
        input_unlike_planned=sum(
            request.input_tokens not in (None, request.planned_input_tokens) for request in whole
        ),
        output_unlike_planned=sum(
            request.output_tokens != request.planned_output_tokens for request in with_usage
        ),
        output_unlike_chunks=sum(
            request.output_tokens != request.num_chunks for request in with_usage
        ),
        without_usage=len(whole) - len(with_usage),
    )


def count_wrong_tokens(judged: Iterable[RequestRecord]) -> Correctness:
    """Returns what the checks of the judged requests found."""
    listed = list(judged)
    return Correctness(
        sum(request.lost_tokens is not None for request in listed),
        _sum(request.lost_tokens for request in listed),
        _sum(request.repeated_tokens for request in listed),
        _sum(request.foreign_tokens for request in listed),
    )


def group_by(
    judged: Iterable[RequestRecord], name_of: Callable[[RequestRecord], str | None]
) -> tuple[Group, ...]:
    """The groups by name; what has no name is in none."""
    members: dict[str, list[RequestRecord]] = {}
    for request in judged:
        name = name_of(request)
        if name is not None:
            members.setdefault(name, []).append(request)
    return tuple(
        Group(
            name,
            len(member),
            sum(not request.is_ok for request in member),
            spread_of(map(ttft_scheduled_s, member)),
            spread_of(map(tpot_s, member)),
            _sum(request.output_tokens for request in member if request.is_ok),
        )
        for name, member in sorted(members.items())
    )


def _sum(values: Iterable[int | None]) -> int | None:
    """The sum of those that there are; `None` if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
