"""How many sequences an engine may have, held to engines that follow the law of their steps."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from serving.domain.capacity.step_places import LEAST_OF, OPEN_S, Places, StepSums

MOST = 256


@dataclass
class SaturatedEngine:
    """It always has as many sequences as it may, each replaced when it has ended.

    A step takes `base_s`, and for each sequence `each_s`, its part of prompts included.
    """

    base_s: float = 0.03
    each_s: float = 0.001
    places: Places = Places(MOST)  # noqa: RUF009 - it is frozen
    now_s: float = 0.0

    def second(self, token_s: float) -> None:
        """Lets one pass."""
        num = self.places.num
        num_steps = max(1, round(1.0 / (self.base_s + self.each_s * num)))
        busy_s = num_steps * (self.base_s + self.each_s * num)
        self.now_s += busy_s
        done = StepSums(num * num_steps, num_steps, busy_s)
        self.places = self.places.after(done, self.now_s, most=MOST, token_s=token_s)

    @property
    def tokens_per_s(self) -> float:
        return self.places.num / (self.base_s + self.each_s * self.places.num)


@given(
    st.floats(0.005, 0.05),
    st.floats(0.0002, 0.002),
    st.floats(1.5, 10.0),
    st.integers(1, MOST),
)
def test_a_saturated_engine_comes_to_have_what_keeps_the_objective(
    base_s: float, each_s: float, times: float, begin: int
) -> None:
    token_s = times * base_s
    engine = SaturatedEngine(base_s, each_s, Places(begin))
    for _ in range(200):
        engine.second(token_s)
    wanted = min(MOST, (token_s - base_s) / each_s)
    if wanted < MOST // LEAST_OF:
        return  # below that steps are not its sequences' fault
    # One more is tried now and then, and taken back.
    assert abs(engine.places.num - wanted) <= 0.1 * wanted + 2


def test_an_objective_that_cannot_be_kept_does_not_shut_an_engine() -> None:
    """Even alone a sequence's tokens take 30 ms. It answers at half of its pace at least."""
    engine = SaturatedEngine()
    tokens = 0.0
    for _ in range(600):
        tokens += engine.tokens_per_s
        engine.second(0.02)
    best = SaturatedEngine().tokens_per_s
    assert tokens / 600 > 0.5 * best


def minute(num_sequences: int, step_s: float, *, tokens_each: float = 1.0) -> StepSums:
    """A minute of such steps, after which nothing before counts."""
    turns = 60.0 / step_s * tokens_each
    return StepSums(num_sequences * turns, turns, 60.0)


def after(places: Places, done: StepSums, token_s: float = 0.09, now_s: float = 100.0) -> int:
    return places.after(done, now_s, most=MOST, token_s=token_s).num


def test_a_little_work_takes_no_place_away() -> None:
    assert after(Places(60), minute(1, 0.031)) == 60


def test_one_second_of_long_prompts_takes_none_away_from_quick_steps() -> None:
    """Of thirty sequences with steps of 30 ms: three prompts at once take a third of a second."""
    places = Places(60, StepSums().then(minute(30, 0.03)))
    assert after(places, StepSums(num_tokens=30 * 24, num_turns=24, busy_s=1.05)) >= 60


def test_the_first_steps_of_a_burst_say_nothing() -> None:
    one_step = StepSums(num_tokens=40, num_turns=1, busy_s=0.2)
    assert after(Places(60), one_step) == 60
    # Nor do long steps with few sequences: they are so because of prompts.
    assert after(Places(60), StepSums(num_tokens=12, num_turns=6, busy_s=0.95)) == 60


def test_a_step_that_gives_several_tokens_may_be_longer() -> None:
    assert after(Places(60), minute(30, 0.16, tokens_each=2.0)) == 60
    assert after(Places(60), minute(30, 0.16)) == 25  # half of the way from 34 to 17


def test_while_it_is_open_nothing_closes_it() -> None:
    least = MOST // LEAST_OF
    slow = minute(least, 0.2)
    opened = Places(least).after(slow, 100.0, most=MOST, token_s=0.05)
    assert (opened.num, opened.open_until_s) == (MOST, 100.0 + OPEN_S)
    assert after(opened, slow, 0.05, 100.0 + OPEN_S - 1) == MOST
    # Half of the way from twice of what it would keep it with.
    assert after(opened, minute(200, 0.25), 0.05, 100.0 + OPEN_S) in (59, 60)


@given(
    st.integers(1, MOST),
    st.floats(0, 1e6),
    st.floats(0, 1000),
    st.floats(0, 100),
    st.floats(1e-6, 10),
)
def test_there_is_always_a_place_and_never_more_than_there_are(
    num: int, tokens: float, turns: float, busy_s: float, token_s: float
) -> None:
    assert 1 <= after(Places(num), StepSums(tokens, turns, busy_s), token_s) <= MOST
