"""What work takes on engines whose steps differ, and where requests go because of it."""

from dataclasses import replace

from serving.domain.capacity.step_law import USUAL_LAW, StepLaw
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.choice.engine_costs import USUAL_COSTS, EngineCosts, costs_of
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.link.messages import EngineStats
from tests.gateway.engines import RecordingSink, ScriptedLink, in_flight

CPU_LAW = StepLaw(0.02, 0.004, 0.0005)


def times(law: StepLaw, factor: float) -> StepLaw:
    return StepLaw(*(factor * part for part in law))


def test_while_nobody_has_told_a_law_all_are_usual() -> None:
    assert EngineCosts(token=64, step=64 * 240, sequence=64 * 4) == USUAL_COSTS
    assert costs_of({"a": None, "b": None}) == {"a": USUAL_COSTS, "b": USUAL_COSTS}


def test_engines_of_one_law_are_usual_whatever_it_is() -> None:
    costs = costs_of({"a": CPU_LAW, "b": times(CPU_LAW, 1.1), "c": None})
    assert costs == dict.fromkeys("abc", USUAL_COSTS)


def test_engine_of_another_pace_has_costs_of_its_own() -> None:
    costs = costs_of({"a": CPU_LAW, "b": CPU_LAW, "c": times(CPU_LAW, 2.0)})
    assert costs["a"] == costs["b"] == USUAL_COSTS
    assert costs["c"] == EngineCosts(128, 2 * 64 * 240, 2 * 64 * 4)


def test_engine_that_differs_in_prompts_alone_has_costs_of_its_own() -> None:
    costs = costs_of({"a": CPU_LAW, "b": CPU_LAW, "c": CPU_LAW._replace(per_prompt_token_s=0.0002)})
    assert costs["c"] == EngineCosts(26, 64 * 240, 64 * 4)


class Fleet:
    """A dispatcher and engines that have told of their steps."""

    def __init__(self, *laws: StepLaw | None) -> None:
        self.dispatcher = Dispatcher("demo", FleetLimits(request_deadline_s=60.0))
        RecordingSink(self.dispatcher)
        self.links = [
            ScriptedLink(self.dispatcher, f"e{number}", places=100) for number in range(len(laws))
        ]
        for link, law in zip(self.links, laws, strict=True):
            link.stats = replace(link.stats, engine_stats=EngineStats(step_law=law))

    def sent(self, count: int, prompt_tokens: int = 500) -> list[int]:
        """How many of so many requests went to each engine, that all run on."""
        for number in range(count):
            prompt = [number % 250] * prompt_tokens
            self.dispatcher.submit(in_flight(self.dispatcher, f"r{number}", 100, prompt))
        return [len(link.submitted) for link in self.links]


async def test_engine_of_half_the_pace_is_sent_less() -> None:
    few = Fleet(CPU_LAW, CPU_LAW, times(CPU_LAW, 2.0))
    quick, as_quick, slow = few.sent(60)
    assert abs(quick - as_quick) <= 1
    assert 0 < slow < 0.7 * quick
    many = Fleet(*[CPU_LAW] * 7, times(CPU_LAW, 2.0))
    *others, slow = many.sent(160)
    assert 0 < slow < 0.7 * min(others)


async def test_engines_that_nearly_agree_are_sent_as_many() -> None:
    assert Fleet(CPU_LAW, times(CPU_LAW, 1.2), None).sent(60) == [20, 20, 20]
    assert Fleet(USUAL_LAW, USUAL_LAW, USUAL_LAW).sent(60) == [20, 20, 20]
