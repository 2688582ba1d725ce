"""Quotas over any number of gateways, which come and go, and a keeper that does.

In simulated time, with what gateways and keeper really say to each other.
"""

import asyncio
import random
from collections.abc import Callable

import msgspec
import pytest

from serving.domain.errors import QuotaExceededError, RequestOverQuotaError
from serving.domain.usage.quotas import Period, Quota, QuotaKind
from serving.domain.usage.usage_report import StoredUsage, UsageAnswer, UsageKeeper, UsageReport
from serving.gateway.quotas.book import QuotaBook, QuotaTicket, duration
from serving.gateway.quotas.teller import UsageTeller

START_S = 1_790_000_000.0
# How often gateways tell, as in production.
PERIOD_S = 0.5
# What one gateway counts waits for its turn to tell, and then for the other's.
DELAY_S = 2 * PERIOD_S
TENANT = "acme"
TOKENS = Quota(QuotaKind.TOKENS, 60_000, Period.MINUTE)
REQUESTS = Quota(QuotaKind.REQUESTS, 100, Period.MINUTE)


class Fleet:
    """Gateways and their keeper, at one time."""

    def __init__(self, num_gateways: int) -> None:
        self.now_s = START_S
        self.keeper: UsageKeeper | None = UsageKeeper("k0")
        self.num_keepers = self.num_gateways = 0
        self.books: list[QuotaBook] = []
        self.taken: list[tuple[float, float]] = []  # when, how much
        for _ in range(num_gateways):
            self.books.append(self.new_book())

    def new_book(self) -> QuotaBook:
        self.num_gateways += 1
        return QuotaBook(f"g{self.num_gateways}")

    def restart(self, number: int) -> None:
        self.books[number] = self.new_book()

    def restart_keeper(self, *, with_notes: bool) -> None:
        stored = None if self.keeper is None else msgspec.msgpack.encode(self.keeper.stored())
        self.num_keepers += 1
        self.keeper = UsageKeeper(f"k{self.num_keepers}")
        if with_notes and stored is not None:
            self.keeper.begin_with(msgspec.msgpack.decode(stored, type=StoredUsage))

    def tell(self) -> None:
        for book in self.books:
            self.tell_of(book)

    def tell_of(self, book: QuotaBook) -> None:
        if self.keeper is None:
            return
        report = book.report()
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=UsageReport)
        answer = msgspec.msgpack.encode(self.keeper.take(sent, self.now_s))
        book.take(msgspec.msgpack.decode(answer, type=UsageAnswer), report)
        book.forget(self.now_s)

    def ask(self, number: int, quota: Quota, tokens: int = 0) -> QuotaTicket | None:
        """Asks for a request of so many tokens; `None` if it is refused."""
        decision = self.books[number].admit(TENANT, [quota], ("demo",), self.now_s)
        if decision.ticket is None:
            return None
        if tokens and decision.ticket.reserve(tokens, self.now_s) is not None:
            decision.ticket.end(was_refused=True)
            return None
        self.taken.append((self.now_s, tokens or 1))
        return decision.ticket

    def run(self, seconds: float, each: Callable[[float], None], step_s: float = 0.05) -> None:
        """Goes on for so long: gateways tell in turn, each once in a period."""
        num_steps = round(seconds / step_s)
        per_period = round(PERIOD_S / step_s)
        for step in range(num_steps):
            self.now_s += step_s
            for number, book in enumerate(self.books):
                if step % per_period == number * per_period // len(self.books):
                    self.tell_of(book)
            each(self.now_s)

    def most_in_a_period(self) -> float:
        """Returns the most that any span of a minute had."""
        most = total = 0.0
        first = 0
        for at_s, amount in self.taken:
            total += amount
            while self.taken[first][0] <= at_s - 60:
                total -= self.taken[first][1]
                first += 1
            most = max(most, total)
        return most


def used_at(book: QuotaBook, fleet: Fleet) -> float:
    """Returns what is used of the first quota as far as one gateway knows."""
    return next(book.uses(fleet.now_s)).used


def flood(fleet: Fleet, chance: random.Random, quota: Quota, tokens: int, rate: float) -> None:
    """Asks so often in a second, at gateways by chance."""
    for _ in range(round(rate * 0.05)):
        fleet.ask(chance.randrange(len(fleet.books)), quota, tokens)


@pytest.mark.parametrize("num_gateways", [1, 4, 16])
def test_all_gateways_together_let_in_what_the_quota_has_and_a_seconds_more(
    num_gateways: int,
) -> None:
    fleet, chance = Fleet(num_gateways), random.Random(1)
    rate, tokens = 100.0, 500  # 50,000 tokens/s are asked for
    fleet.run(200, lambda _: flood(fleet, chance, TOKENS, tokens, rate))
    most = fleet.most_in_a_period()
    others = (num_gateways - 1) / num_gateways
    assert most <= TOKENS.limit + others * rate * tokens * DELAY_S
    assert most >= TOKENS.limit - tokens
    # And over minutes what it has, but for a sixtieth.
    total = sum(amount for _, amount in fleet.taken)
    assert total >= 0.95 * TOKENS.limit * 200 / 61


def test_a_gateway_that_comes_knows_what_was_used_before_and_loses_half_a_second() -> None:
    fleet, chance = Fleet(2), random.Random(2)
    fleet.run(10, lambda _: flood(fleet, chance, TOKENS, 500, 40))
    for number in (0, 1):
        fleet.restart(number)
        fleet.tell_of(fleet.books[number])
    lost = 2 * 20_000 * PERIOD_S
    fleet.run(45, lambda _: flood(fleet, chance, TOKENS, 500, 40))
    assert fleet.most_in_a_period() <= TOKENS.limit + 20_000 * DELAY_S + lost


@pytest.mark.parametrize("with_notes", [True, False])
def test_a_keeper_that_is_made_anew_is_told_by_the_gateways_that_are_there(
    *, with_notes: bool
) -> None:
    fleet, chance = Fleet(4), random.Random(3)
    fleet.run(20, lambda _: flood(fleet, chance, TOKENS, 500, 40))
    before = used_at(fleet.books[0], fleet)
    fleet.restart_keeper(with_notes=with_notes)
    fleet.tell()  # they learn of the new one, and tell it all the next time
    fleet.tell()
    fleet.tell()
    assert {used_at(book, fleet) for book in fleet.books} == {
        sum(amount for _, amount in fleet.taken)
    }
    assert before <= used_at(fleet.books[0], fleet)
    fleet.run(30, lambda _: flood(fleet, chance, TOKENS, 500, 40))
    assert fleet.most_in_a_period() <= TOKENS.limit + 0.75 * 20_000 * DELAY_S


def test_gateway_and_keeper_that_go_together_leave_what_was_written() -> None:
    fleet, chance = Fleet(1), random.Random(4)
    fleet.run(10, lambda _: flood(fleet, chance, TOKENS, 500, 10))
    fleet.restart_keeper(with_notes=True)
    fleet.restart(0)
    fleet.books[0].know({TENANT: [TOKENS]})
    fleet.tell()
    used = used_at(fleet.books[0], fleet)
    assert used >= sum(amount for _, amount in fleet.taken) - 10 * 500 * DELAY_S


def test_without_a_keeper_each_gateway_goes_by_its_own_counts() -> None:
    fleet, chance = Fleet(4), random.Random(5)
    fleet.keeper = None
    fleet.run(50, lambda _: flood(fleet, chance, REQUESTS, 0, 100))
    assert len(fleet.taken) == 4 * REQUESTS.limit


def test_a_report_that_is_lost_or_comes_twice_changes_nothing() -> None:
    fleet = Fleet(2)
    assert fleet.keeper is not None
    assert fleet.ask(0, TOKENS, 300) is not None
    lost = fleet.books[0].report()
    fleet.keeper.take(lost, fleet.now_s)
    fleet.keeper.take(lost, fleet.now_s)
    assert fleet.ask(0, TOKENS, 200) is not None
    fleet.tell()
    fleet.books[1].know({TENANT: [TOKENS]})
    fleet.tell()
    assert [used_at(book, fleet) for book in fleet.books] == [500, 500]


def test_requests_in_flight_are_those_of_all_gateways_that_speak() -> None:
    fleet, quota = Fleet(2), Quota(QuotaKind.CONCURRENT, 3)
    tickets = [fleet.ask(0, quota), fleet.ask(0, quota)]
    fleet.tell()
    fleet.tell()
    assert fleet.ask(1, quota) is not None
    assert fleet.ask(1, quota) is None
    assert tickets[0] is not None
    tickets[0].end(was_refused=False)
    tickets[0].end(was_refused=False)
    fleet.tell()
    assert fleet.ask(1, quota) is not None
    # The first gateway falls silent with one in flight.
    fleet.now_s += 10
    fleet.books.pop(0)
    fleet.tell()
    assert fleet.ask(0, quota) is not None


def test_one_gateway_counts_chips_and_another_when_it_is_gone() -> None:
    quota = Quota(QuotaKind.USD, 1.0, Period.HOUR)
    fleet = Fleet(3)
    for book in fleet.books:
        book.know({TENANT: [quota]})
    fleet.tell()

    def spend() -> None:
        for book in fleet.books:
            if book.counts_chips:
                book.used_chips(TENANT, "demo", 10.0, 0.25, fleet.now_s)

    spend()
    fleet.tell()
    fleet.tell()
    assert [used_at(book, fleet) for book in fleet.books] == [0.25] * 3
    fleet.books.pop(0)
    fleet.now_s += 10
    fleet.tell()
    spend()
    fleet.tell()
    fleet.tell()
    assert [used_at(book, fleet) for book in fleet.books] == [0.5] * 2
    for _ in range(2):
        spend()
    fleet.tell()
    fleet.tell()
    assert [fleet.ask(number, quota) for number in (0, 1)] == [None, None]


def test_a_quota_that_is_taken_back_is_counted_no_more() -> None:
    fleet = Fleet(1)
    (book,) = fleet.books
    ticket = fleet.ask(0, TOKENS, 500)
    assert ticket is not None
    told = book.report()
    book.know({TENANT: [REQUESTS], "other": [TOKENS]})
    assert fleet.keeper is not None
    book.take(fleet.keeper.take(told, fleet.now_s), told)
    assert [(use.tenant, use.used) for use in book.uses(fleet.now_s)] == [
        (TENANT, 0),
        ("other", 0),
    ]
    ticket.settle(100, fleet.now_s, fleet.now_s)
    ticket.end(was_refused=False)


def test_a_keeper_drops_what_is_over() -> None:
    fleet, chance = Fleet(2), random.Random(6)
    fleet.run(300, lambda _: flood(fleet, chance, TOKENS, 10, 20))
    assert fleet.keeper is not None
    (_, _, _, parts), *others = fleet.keeper.stored().meters
    assert len(parts) <= 75
    assert len(others) == 1
    for _ in range(2):
        fleet.now_s += 1000
        fleet.tell()
    assert fleet.keeper.stored().meters == []


def refused_at(book: QuotaBook, fleet: Fleet) -> list[int]:
    return [use.refused for use in book.uses(fleet.now_s)]


def test_requests_refused_at_any_gateway_count_for_the_quotas_period() -> None:
    fleet, quota = Fleet(2), Quota(QuotaKind.REQUESTS, 1, Period.MINUTE)
    assert fleet.ask(0, quota) is not None
    fleet.tell()
    fleet.tell()
    asked = [fleet.ask(0, quota), fleet.ask(1, quota), fleet.ask(1, quota)]
    fleet.tell()
    fleet.tell()
    assert asked == [None] * 3
    assert [refused_at(book, fleet) for book in fleet.books] == [[3], [3]]
    # A gateway and a keeper that come know of them.
    fleet.restart_keeper(with_notes=True)
    fleet.restart(0)
    fleet.books[0].know({TENANT: [quota]})
    fleet.tell()
    fleet.tell()
    assert [refused_at(book, fleet) for book in fleet.books] == [[3], [3]]
    fleet.now_s += 62
    assert [refused_at(book, fleet) for book in fleet.books] == [[0], [0]]


def test_a_request_is_refused_because_of_the_quota_that_its_client_is_told_of() -> None:
    fleet, concurrent = Fleet(1), Quota(QuotaKind.CONCURRENT, 1)
    (book,) = fleet.books
    quotas = [REQUESTS, concurrent, Quota(QuotaKind.REQUESTS, 1, Period.DAY)]
    book.admit(TENANT, quotas, ("demo",), fleet.now_s)
    error = book.admit(TENANT, quotas, ("demo",), fleet.now_s).error
    assert error is not None
    assert "1 of 1 concurrent are used" in error.message
    assert refused_at(book, fleet) == [0, 1, 0]
    # Requests in flight have no period: it counts for an hour.
    fleet.now_s += 3600
    assert refused_at(book, fleet) == [0, 1, 0]
    fleet.now_s += 61
    assert refused_at(book, fleet) == [0, 0, 0]


@pytest.mark.parametrize("needs", [20, 200])
def test_a_request_whose_sequences_are_too_many_is_refused_once(needs: int) -> None:
    fleet, quota = Fleet(1), Quota(QuotaKind.TOKENS, 100, Period.HOUR)
    ticket = fleet.ask(0, quota, 90)
    assert ticket is not None
    second = fleet.books[0].admit(TENANT, [quota], ("demo",), fleet.now_s).ticket
    assert second is not None
    assert None not in [second.reserve(needs, fleet.now_s) for _ in range(3)]
    assert refused_at(fleet.books[0], fleet) == [1]


async def test_quotas_that_are_all_taken_back_are_counted_no_more() -> None:
    book, asked = QuotaBook(), asyncio.Event()
    book.know({TENANT: [TOKENS]})

    def quotas() -> dict[str, list[Quota]]:
        asked.set()
        return {}

    async def tell(report: bytes) -> bytes:
        raise AssertionError(f"there is nothing to tell: {report!r}")

    running = asyncio.create_task(UsageTeller(book, tell, quotas).run())
    await asked.wait()
    running.cancel()
    assert list(book.uses(START_S)) == []


def refusal(quota: Quota, *, taken: int, needs: int = 1) -> tuple[float | None, str]:
    book = QuotaBook()
    decision = book.admit(TENANT, [quota], ("demo",), START_S)
    assert decision.ticket is not None
    decision.ticket.settle(taken, START_S, START_S)
    error = decision.ticket.reserve(needs, START_S + 30)
    assert error is not None
    return error.retry_after_s, error.message


def test_a_refusal_says_when_there_is_room() -> None:
    quota = Quota(QuotaKind.TOKENS, 100, Period.MINUTE)
    in_s, message = refusal(quota, taken=95, needs=10)
    assert in_s == 31  # 60 s after the second in which they were counted
    assert message == "95 of 100 tokens per minute are used; retry in 31 s."


def test_a_request_that_is_larger_than_the_quota_is_told_so() -> None:
    quota = Quota(QuotaKind.TOKENS, 100, Period.MINUTE)
    in_s, message = refusal(quota, taken=0, needs=101)
    assert (in_s, message) == (None, "The request needs 101. Allowed: 100 tokens per minute.")
    assert RequestOverQuotaError.status == 400


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        (2, "4,999,999 of 5,000,000 tokens per day are used; "),
        (5_000_001, "The request needs 5,000,001. Allowed: 5,000,000 tokens per day."),
    ],
)
def test_large_amounts_are_told_to_the_last_digit(needs: int, words: str) -> None:
    quota = Quota(QuotaKind.TOKENS, 5_000_000, Period.DAY)
    _, message = refusal(quota, taken=4_999_999, needs=needs)
    assert message.startswith(words)


def test_what_we_refuse_for_want_of_room_does_not_count() -> None:
    book, quota = QuotaBook(), Quota(QuotaKind.REQUESTS, 1, Period.MINUTE)
    ticket = book.admit(TENANT, [quota], ("demo",), START_S).ticket
    assert ticket is not None
    error = book.admit(TENANT, [quota], ("demo",), START_S).error
    assert isinstance(error, QuotaExceededError)
    ticket.end(was_refused=True)
    assert book.admit(TENANT, [quota], ("demo",), START_S).ticket is not None


def test_tenants_and_models_are_counted_apart_and_a_limit_may_change() -> None:
    book = QuotaBook()
    of_demo = Quota(QuotaKind.REQUESTS, 1, Period.DAY, frozenset({"demo"}))
    assert book.admit("a", [of_demo], ("demo",), START_S).ticket is not None
    assert book.admit("a", [of_demo], ("demo",), START_S).ticket is None
    assert book.admit("a", [of_demo], ("other",), START_S).ticket is not None
    assert book.admit("b", [of_demo], ("demo",), START_S).ticket is not None
    more = Quota(QuotaKind.REQUESTS, 2, Period.DAY, frozenset({"demo"}))
    assert book.admit("a", [more], ("demo",), START_S).ticket is not None
    assert book.admit("a", [more], ("demo",), START_S).ticket is None


def test_headers_say_what_is_left_of_the_quota_that_is_nearest_its_end() -> None:
    book = QuotaBook()
    quotas = [
        Quota(QuotaKind.REQUESTS, 10, Period.MINUTE),
        Quota(QuotaKind.REQUESTS, 12, Period.DAY),
        Quota(QuotaKind.TOKENS, 1000, Period.HOUR),
        Quota(QuotaKind.USD, 2.5, Period.DAY),
        Quota(QuotaKind.CONCURRENT, 4),
    ]
    for _ in range(3):
        decision = book.admit(TENANT, quotas, ("demo",), START_S)
    headers = {name.decode(): value.decode() for name, value in decision.headers}
    assert headers == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "7",
        "x-ratelimit-reset-requests": "1m1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "1000",
        "x-ratelimit-reset-tokens": "0s",
        "x-ratelimit-limit-usd": "2.5000",
        "x-ratelimit-remaining-usd": "2.5000",
        "x-ratelimit-reset-usd": "0s",
        "x-ratelimit-limit-concurrent": "4",
        "x-ratelimit-remaining-concurrent": "1",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (0.2, "1s"), (59.0, "59s"), (360.0, "6m0s"), (83_052.0, "23h4m12s")],
)
def test_lengths_of_time_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
