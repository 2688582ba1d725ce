"""What a first token takes at least, and who is refused because that is too long."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.domain.errors import DeadlineTooShortError, OverloadedError
from serving.domain.tokens.block_hashes import first_parent
from serving.domain.tokens.cached_blocks import CacheLayout, joined
from serving.domain.tokens.named_blocks import NamedBlocks
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.gateway.dispatch.first_token_times import (
    FirstTokenCosts,
    FirstTokenTimes,
    RecentFirstTokens,
)
from serving.link.messages import CacheSnapshot
from tests.engine.simulated_time import run_simulated
from tests.gateway.engines import RecordingSink, ScriptedLink, in_flight

from .test_forecast import TWO_ENGINES, Line

LAYOUT = CacheLayout.of_blocks(16, first_parent())
PROMPT = list(range(8000))
# Exact in a float, also after ten seconds.
quarters = st.integers(0, 80).map(lambda count: count / 4)


def seen(*costs: int, law: Callable[[int], float], times: int = 8) -> RecentFirstTokens:
    recent = RecentFirstTokens()
    for _ in range(times):
        for cost in costs:
            recent.took(cost, law(cost), 0.0)
    return recent


def test_nothing_is_known_before_a_few_have_come_and_after_a_minute() -> None:
    recent = RecentFirstTokens()
    for _ in range(7):
        recent.took(1000, 0.5, 0.0)
    assert recent.least_s(1000, 0.0) == 0.0
    recent.took(1000, 0.5, 10.0)
    assert recent.least_s(1000, 10.0) == 0.5
    assert recent.least_s(1000, 60.0) == 0.5
    assert recent.least_s(1000, 60.1) == 0.0


def test_a_larger_one_takes_no_less_and_a_smaller_one_its_share() -> None:
    recent = seen(1000, law=lambda _: 0.5)
    assert recent.least_s(4000, 0.0) == 0.5
    assert recent.least_s(500, 0.0) == 0.25


def test_what_is_nearest_counts_and_a_few_that_stood_behind_something_do_not() -> None:
    recent = seen(100, 10_000, law=lambda cost: cost / 10_000)
    for _ in range(3):
        recent.took(10_000, 30.0, 0.0)
    assert recent.least_s(10_000, 0.0) == 1.0
    assert recent.least_s(100, 0.0) == 0.01


def test_an_engine_that_has_nothing_else_to_do_is_as_quick_as_the_quickest() -> None:
    recent = seen(1000, law=lambda _: 0.1)  # others are nearer in time
    for second, took_s in enumerate((2.0, 2.0, 2.0, 0.5, 2.0, 2.0, 2.0, 2.0)):
        recent.took(1000, took_s, 1.0 + second)
    assert recent.times(FirstTokenCosts(3000, 1000), 9.0) == FirstTokenTimes(2.0, 0.5)


def test_longest_is_no_shorter_than_any_and_follows() -> None:
    recent = seen(1000, law=lambda _: 5.0)
    assert recent.longest_s == 5.0
    for _ in range(16):
        recent.took(1000, 0.5, 100.0)
    assert recent.longest_s == 0.5


@given(
    st.lists(st.integers(1, 200_000), min_size=8, max_size=300),
    st.floats(0.0, 1.0),
    st.floats(1e-6, 1e-3),
    st.integers(1, 200_000),
)
def test_it_is_never_longer_than_the_law_of_engines(
    costs: list[int], base_s: float, per_token_s: float, cost: int
) -> None:
    def law(cost: int) -> float:
        return base_s + per_token_s * cost

    recent = seen(*costs, law=law, times=1)
    assert recent.least_s(cost, 0.0) <= law(cost) * (1 + 1e-9)
    assert recent.least_s(cost, 0.0) <= recent.longest_s


# -- who is refused --


@given(
    # Whole tokens: 5e-201 of one are a wait that no sum of seconds shows.
    st.lists(st.integers(0, 3000).map(float), max_size=6),
    quarters.filter(bool),
    quarters,
    quarters,
    st.booleans(),
    st.booleans(),
    st.integers(0, 5),
)
def test_who_is_refused_could_not_have_been_in_time_by_the_same_forecast(
    works: list[float],
    patience_s: float,
    alone_s: float,
    more_s: float,
    is_asked: bool,
    is_rate_known: bool,
    num_refused: int,
) -> None:
    line = Line(is_rate_known=is_rate_known)
    for work in works:
        line.wait(work, patience_s=0.1)
    first = FirstTokenTimes(alone_s + more_s, alone_s)
    for _ in range(num_refused):
        line.come(line.request(200.0, 0.5))
    request = line.request(patience_s=patience_s)
    request.patience_s = patience_s if is_asked else None
    wait_s = line.forecast.wait_s(request, TWO_ENGINES, line.now_s)
    promised_s = line.forecast.wait_s(request, TWO_ENGINES, line.now_s, with_promises=True)
    first_s = first.alone_s if line.waiting else first.soonest_s
    try:
        in_s = line.forecast.come_back_in_s(
            request, TWO_ENGINES, line.now_s, lambda: first, first.soonest_s
        )
    except DeadlineTooShortError:
        assert is_asked
        assert first.alone_s > patience_s
        return
    if not is_asked and first.alone_s > patience_s:
        first_s = 0.0  # not even alone: its turn alone counts
    if in_s is not None:
        assert (promised_s or 0.0) + first_s > patience_s
        assert in_s >= 1.0
    else:
        assert (wait_s or 0.0) + first_s <= patience_s


def test_who_has_less_than_the_line_and_its_own_first_token_take_comes_back_later() -> None:
    line = Line()
    line.wait(800.0, patience_s=1.0)  # 4 s, and the margin
    wait_s = line.wait_s()
    assert wait_s is not None
    times = FirstTokenTimes(3.0, 2.0)

    def come(patience_s: float) -> float | None:
        request = line.request(200.0, patience_s)
        return line.forecast.come_back_in_s(request, TWO_ENGINES, line.now_s, lambda: times, 3.0)

    # The line of its engine is done by then: of its own two seconds count.
    assert come(wait_s + 2.1) is None
    in_s = come(wait_s + 1.9)
    assert in_s == pytest.approx(wait_s - (wait_s - 0.1) / 2)


class Gateway:
    """One dispatcher, and an engine that computes 1,000 tokens of prompts a second."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher("demo", FleetLimits())
        self.sink = RecordingSink(self.dispatcher)
        self.link = ScriptedLink(self.dispatcher, places=9, cache_layout=LAYOUT)
        self.link.max_prompt_tokens = len(PROMPT)
        self.link.on_cache(CacheSnapshot(b"", is_first=True))

    def ask(self, name: str, prompt: list[int], patience_s: float | None = None) -> bool:
        """Asks; returns whether it is on the engine."""
        blocks = NamedBlocks(prompt)
        self.dispatcher.submit(
            in_flight(self.dispatcher, name, 1, prompt, blocks=blocks, patience_s=patience_s)
        )
        return name in self.link.running

    async def warm_up(self) -> None:
        for number in range(10):
            prompt = [number, *PROMPT[1:2000]]
            assert self.ask(f"warm{number}", prompt)
            await asyncio.sleep(2.0)
            self.link.step()


def runs(main: Callable[[Gateway], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        gateway = Gateway()
        await gateway.warm_up()
        await main(gateway)
        gateway.dispatcher.shutdown()

    run_simulated(run())


def test_a_prompt_that_takes_longer_than_its_client_waits_is_refused_at_once() -> None:
    async def main(gateway: Gateway) -> None:
        assert not gateway.ask("hasty", [77, *PROMPT[1:2000]], 0.5)
        error = gateway.sink.failures["hasty"]
        assert isinstance(error, DeadlineTooShortError)
        assert "takes 2.0 s at least" in error.message
        # It would have been in time, or nobody has said when it has to come.
        assert gateway.ask("short", [79, *PROMPT[1:200]], 0.5)
        assert gateway.ask("patient", [78, *PROMPT[1:2000]], 3.0)
        assert gateway.ask("quiet", [80, *PROMPT[1:2000]])

    runs(main)


def test_a_prompt_that_is_cached_is_let_in() -> None:
    async def main(gateway: Gateway) -> None:
        keys = joined(NamedBlocks(PROMPT[:2000]).keys(LAYOUT))
        gateway.link.on_cache(CacheSnapshot(keys, is_first=False))
        assert gateway.ask("cached", PROMPT[:2000], 0.5)

    runs(main)


def test_what_stands_in_the_engines_line_counts_and_is_worth_coming_back_for() -> None:
    async def main(gateway: Gateway) -> None:
        gateway.link.tell(backlog_tokens=2000)
        prompt = [77, *PROMPT[1:1000]]
        assert not gateway.ask("early", prompt, 1.5)
        error = gateway.sink.failures["early"]
        assert isinstance(error, OverloadedError)
        assert error.message == (
            "The engines of 'demo' are busy for longer than the request has; retry in 1 s."
        )
        gateway.link.tell(backlog_tokens=0)
        await asyncio.sleep(error.retry_after_s)
        assert gateway.ask("again", prompt, 1.5)

    runs(main)
