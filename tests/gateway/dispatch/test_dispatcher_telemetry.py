"""The dispatcher reports each point of a request's life, and each is counted once."""

import pytest

from serving.domain.models.request_fields.service_class import ServiceClass
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.gateway.telemetry.request_metrics import ClassMetrics
from tests.gateway.engines import RecordingSink, ScriptedLink, in_flight


@pytest.fixture
def dispatcher() -> Dispatcher:
    dispatcher = Dispatcher("demo", FleetLimits(request_deadline_s=600.0, max_engine_losses=1))
    RecordingSink(dispatcher)
    return dispatcher


def local(dispatcher: Dispatcher) -> ClassMetrics:
    return dispatcher.telemetry.metrics.classes["local"]


async def test_undisturbed_sequence_is_counted_with_its_tokens(dispatcher: Dispatcher) -> None:
    link = ScriptedLink(dispatcher)
    dispatcher.submit(in_flight(dispatcher, "r", 5, [1, 2, 3]))
    link.step(5)
    numbers = local(dispatcher)
    assert (numbers.input_tokens, numbers.output_tokens) == (3, 5)
    assert numbers.sequences == {"length": 1}
    histograms = (
        numbers.to_first_token,
        numbers.inter_token,
        numbers.queue_times[ServiceClass.STANDARD],
        numbers.per_output_token,
    )
    assert [sum(histogram.counts) for histogram in histograms] == [1, 4, 1, 1]


async def test_aborted_sequence_is_counted_once(dispatcher: Dispatcher) -> None:
    ScriptedLink(dispatcher)
    dispatcher.submit(in_flight(dispatcher, "r"))
    dispatcher.abort(["r", "r", "nobody"])
    assert local(dispatcher).sequences == {"aborted": 1}


async def test_sequence_aborted_while_it_waits_has_no_class(dispatcher: Dispatcher) -> None:
    dispatcher.submit(in_flight(dispatcher, "r"))
    dispatcher.abort(["r"])
    assert dispatcher.telemetry.metrics.classes[""].sequences == {"aborted": 1}


async def test_moves_are_counted_by_why_their_engine_went(dispatcher: Dispatcher) -> None:
    links = [ScriptedLink(dispatcher, f"e{i}") for i in range(2)]
    dispatcher.submit(in_flight(dispatcher, "r", 50))
    here = next(link for link in links if link.running)
    there = next(link for link in links if not link.running)
    here.step()
    dispatcher.drain_engine(here.engine_id, "the test says so", 0.0)
    there.step()
    numbers = local(dispatcher)
    assert numbers.resumes == {"draining": 1}
    assert sum(numbers.resume_stall.counts) == 1
    here.end()
    assert numbers.link_losses == {"draining": 1}


async def test_lost_engine_counts_its_link_and_what_it_took_down(dispatcher: Dispatcher) -> None:
    link = ScriptedLink(dispatcher)
    dispatcher.submit(in_flight(dispatcher, "r"))
    link.end()
    dispatcher.abort(["r"])  # vLLM's frontend cleans up after a failure
    numbers = local(dispatcher)
    assert numbers.link_losses == {"lost": 1}
    assert numbers.sequences == {"poison_request": 1}
    assert numbers.resumes == {}
