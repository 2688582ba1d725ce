"""The dispatcher over scripted engines: dispatch, resume, abort, deadlines, blame, load."""

import asyncio
import gc
import time
from typing import Any

import pytest

from serving.domain.capacity.objectives import Objectives
from serving.domain.errors import (
    CannotResumeError,
    MalformedRequestError,
    NoEngineInTimeError,
    NoTokenLeftError,
    PoisonRequestError,
    RequestError,
)
from serving.domain.load_report import LoadSample
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.gateway.dispatch.admission import FleetLimits, QueueState
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.gateway.dispatch.load import load_of
from serving.gateway.dispatch.requests import PROVING_TOKENS, InFlightRequest
from serving.link.messages import EngineEnd, EngineLoad, Finish, RoomWanted, Step, TokenOutput
from tests.engine.simulated_time import run_simulated
from tests.gateway.engines import RecordingSink, ScriptedLink, answer_to, in_flight

DEADLINE_S = 10.0
PATIENT = FleetLimits(request_deadline_s=600.0)


class Fleet:
    """A dispatcher, what it delivered, and whom it failed."""

    def __init__(self, limits: FleetLimits = PATIENT) -> None:
        self.dispatcher = Dispatcher("demo", limits)
        self.sink = RecordingSink(self.dispatcher)
        self.failures = self.sink.failures
        self.failed = self.sink.failed

    async def engine_comes(self, in_s: float) -> bool:
        """As a request in the admission queue waits for an engine."""
        state = QueueState(0.0, self.dispatcher.num_waiting)
        try:
            await self.dispatcher.queue.admit(state, lambda: self.dispatcher.has_engine, in_s)
        except NoEngineInTimeError:
            return False
        return True

    def add(self, *request_ids: str, max_tokens: int = 5, **changes: Any) -> None:
        for request_id in request_ids:
            request = in_flight(self.dispatcher, request_id, max_tokens, **changes)
            self.dispatcher.submit(request)

    @property
    def tokens(self) -> dict[str, list[int]]:
        return self.sink.tokens

    @property
    def load(self) -> LoadSample:
        return load_of([self.dispatcher], self.dispatcher.queue, time.monotonic())

    @property
    def num_resumes(self) -> int:
        classes = self.dispatcher.telemetry.metrics.classes.values()
        return sum(count for numbers in classes for count in numbers.resumes.values())

    def is_empty(self) -> bool:
        return (
            self.dispatcher.num_in_flight == 0
            and self.dispatcher.num_waiting == 0
            and all(not connection.requests for connection in self.dispatcher.connections)
        )


# -- the undisturbed way --


async def test_request_runs_on_one_engine_and_leaves_nothing_behind() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.dispatcher)
    fleet.add("r")
    link.step(5)
    outputs = [output for step in fleet.sink.steps for output in step]
    assert [output.token_ids[0] for output in outputs] == answer_to("r")
    assert {output.request_id for output in outputs} == {"r"}
    assert [output.finish for output in outputs][-2:] == [None, Finish.LENGTH]
    assert fleet.is_empty()


async def test_requests_spread_over_the_engines() -> None:
    fleet = Fleet()
    links = [ScriptedLink(fleet.dispatcher, f"e{i}") for i in range(3)]
    fleet.add(*"abcdef")
    assert [len(link.submitted) for link in links] == [2, 2, 2]


async def test_one_step_of_an_engine_is_one_delivery() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.dispatcher)
    fleet.add("a", "b", "c")
    link.step()
    (step,) = fleet.sink.steps
    assert [output.request_id for output in step] == ["a", "b", "c"]


async def test_step_tells_how_busy_its_engine_is() -> None:
    fleet = Fleet()
    ScriptedLink(fleet.dispatcher)
    fleet.dispatcher.take_step("e1", Step([], EngineLoad(3, 2, 0.5)))
    assert fleet.dispatcher.connections[0].load == EngineLoad(3, 2, 0.5)


async def test_step_of_an_unknown_engine_is_ignored() -> None:
    fleet = Fleet()
    fleet.dispatcher.take_step("nobody", Step([TokenOutput("r", [1])]))
    assert fleet.sink.steps == []


# -- resume --


def aborts(*wire_ids: str) -> Step:
    """What vLLM's engine core says of each request when it is told to end."""
    return Step([TokenOutput(wire_id, [], int(Finish.ABORT)) for wire_id in wire_ids])


@pytest.mark.parametrize("how", [EngineEnd.CRASHED, None])
async def test_request_that_its_engine_gives_up_goes_on_at_another(how: EngineEnd | None) -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.dispatcher, "e1"), ScriptedLink(fleet.dispatcher, "e2")
    fleet.add("r", "s", "t")
    first.step(2)
    second.step(1)
    # Of "r" and "t", which are on it, it says one to be aborted, and the other nothing.
    fleet.dispatcher.take_step("e1", aborts("r"))
    assert [
        (request.request_id, request.emitted_token_ids) for request in second.submitted[1:]
    ] == [
        ("t~1", answer_to("t")[:2]),
        ("r~1", answer_to("r")[:2]),
    ]
    fleet.add("u")  # comes to the engine that has not said that it ends
    assert [request.request_id for request in first.submitted] == ["r", "t"]
    first.end(how)
    second.step(5)
    tokens = fleet.tokens
    assert tokens == {name: answer_to(name) for name in "rstu"}
    assert fleet.failures == {}
    assert fleet.is_empty()


async def test_request_that_the_last_engine_gives_up_waits_for_the_next() -> None:
    fleet = Fleet()
    first = ScriptedLink(fleet.dispatcher, "e1")
    fleet.add("r")
    first.step(2)
    fleet.dispatcher.take_step("e1", aborts("r"))
    assert fleet.dispatcher.num_waiting == 1
    second = ScriptedLink(fleet.dispatcher, "e2")
    second.step(3)
    assert fleet.tokens == {"r": answer_to("r")}
    assert fleet.failures == {}


async def test_abort_that_the_client_asked_for_moves_nothing() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.dispatcher, "e1"), ScriptedLink(fleet.dispatcher, "e2")
    fleet.add("r")
    first.step(1)
    fleet.dispatcher.abort(["r"])
    fleet.dispatcher.take_step("e1", aborts("r"))
    assert second.submitted == []
    assert fleet.dispatcher.has_engine
    assert all(not connection.is_draining for connection in fleet.dispatcher.connections)
    assert fleet.is_empty()


@pytest.mark.parametrize("position", range(5))
async def test_request_continues_token_exactly_where_its_engine_died(position: int) -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.dispatcher, "e1"), ScriptedLink(fleet.dispatcher, "e2")
    fleet.add("r")
    first.step(position)
    first.end()
    (resumed,) = second.submitted
    assert resumed.emitted_token_ids == answer_to("r")[:position]
    assert (resumed.prompt_token_ids, resumed.max_tokens) == (list(b"r"), 5)
    second.step(5 - position)
    assert fleet.tokens == {"r": answer_to("r")}
    assert fleet.num_resumes == 1
    assert fleet.is_empty()


async def test_request_survives_one_engine_after_another() -> None:
    fleet = Fleet()
    fleet.add("r", max_tokens=100)
    for number in range(10):
        link = ScriptedLink(fleet.dispatcher, f"e{number}")
        link.step(PROVING_TOKENS)
        link.end()
    ScriptedLink(fleet.dispatcher, "last").step(20)
    assert fleet.tokens == {"r": answer_to("r", 100)}
    assert fleet.failures == {}
    assert fleet.is_empty()


async def test_without_another_engine_the_request_waits_for_one() -> None:
    fleet = Fleet()
    first = ScriptedLink(fleet.dispatcher, "e1")
    fleet.add("r")
    first.step(2)
    first.end()
    assert fleet.dispatcher.num_waiting == 1
    second = ScriptedLink(fleet.dispatcher, "e2")
    assert fleet.dispatcher.num_waiting == 0
    second.step(3)
    assert fleet.tokens == {"r": answer_to("r")}


async def test_drained_engine_gives_its_requests_back_and_is_not_blamed() -> None:
    fleet = Fleet(FleetLimits(request_deadline_s=600.0, max_engine_losses=1))
    first, second = ScriptedLink(fleet.dispatcher, "e1"), ScriptedLink(fleet.dispatcher, "e2")
    fleet.add("a", "b")
    first.step(2)
    fleet.dispatcher.drain_engine("e1", "scaling down", 0.0)
    assert first.aborted == ["a"]
    second.step(5)
    assert fleet.tokens == {"a": answer_to("a"), "b": answer_to("b")}
    fleet.add("c")
    assert [request.request_id for request in first.submitted] == ["a"]
    assert fleet.failures == {}


async def test_drained_engine_keeps_what_it_can_finish_in_time() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.dispatcher, "e1"), ScriptedLink(fleet.dispatcher, "e2")
    fleet.add("a", "b")
    first.step(2)
    fleet.dispatcher.drain_engine("e1", "preempted", 60.0)
    assert first.aborted == []
    first.step(3)
    second.step(5)
    assert fleet.tokens == {"a": answer_to("a"), "b": answer_to("b")}
    assert fleet.num_resumes == 0


async def test_what_a_drained_engine_did_not_finish_after_all_moves_before_its_end() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.dispatcher, "e1"), ScriptedLink(fleet.dispatcher, "e2")
    fleet.add("a")
    first.step(2)
    fleet.dispatcher.drain_engine("e1", "preempted", 0.6)
    async with asyncio.timeout(10):
        while not second.submitted:  # noqa: ASYNC110 - the link has no event for it
            await asyncio.sleep(0.01)
    assert first.aborted == ["a"]
    second.step(3)
    assert fleet.tokens == {"a": answer_to("a")}


async def test_requests_leave_a_drained_engine_when_another_one_comes() -> None:
    fleet = Fleet()
    first = ScriptedLink(fleet.dispatcher, "e1")
    fleet.add("a")
    fleet.dispatcher.drain_engine("e1", "preempted", 60.0)
    assert first.aborted == []
    second = ScriptedLink(fleet.dispatcher, "e2")
    assert first.aborted == ["a"]
    second.step(5)
    assert fleet.tokens == {"a": answer_to("a")}


async def test_draining_without_an_end_moves_nothing_until_the_end_is_said() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.dispatcher, "e1"), ScriptedLink(fleet.dispatcher, "e2")
    fleet.add("a")
    fleet.dispatcher.drain_engine("e1", "listed as draining", None)
    assert (first.aborted, fleet.dispatcher.connections[0].is_draining) == ([], True)
    fleet.dispatcher.drain_engine("e1", "preempted", 0.0)
    assert (first.aborted, len(second.submitted)) == (["a"], 1)


async def test_what_an_engine_sends_of_an_earlier_attempt_is_ignored() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.dispatcher, "e1"), ScriptedLink(fleet.dispatcher, "e2")
    fleet.add("r")
    first.step(2)
    late = first.make_step()
    fleet.dispatcher.drain_engine("e1", "scaling down", 0.0)
    fleet.dispatcher.take_step("e1", late)
    second.step(1)
    fleet.dispatcher.take_step("e1", late)
    second.step(2)
    assert fleet.tokens == {"r": answer_to("r")}
    assert fleet.is_empty()


async def test_request_given_to_a_link_that_just_broke_moves_with_its_loss() -> None:
    fleet = Fleet()
    first = ScriptedLink(fleet.dispatcher, "e1")
    first.is_broken = True
    fleet.add("r")
    assert (fleet.dispatcher.num_in_flight, fleet.dispatcher.num_waiting) == (1, 0)
    second = ScriptedLink(fleet.dispatcher, "e2")
    first.end()
    second.step(5)
    assert fleet.tokens == {"r": answer_to("r")}


async def test_request_that_cannot_resume_fails_once_it_has_emitted() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.dispatcher, "e1"), ScriptedLink(fleet.dispatcher, "e2")
    fleet.add("a", "b", "c", is_resumable=False)
    first.step()  # "a" and "c" have emitted
    first.end()
    assert {key: type(error) for key, error in fleet.failures.items()} == {
        "a": CannotResumeError,
        "c": CannotResumeError,
    }
    second.end()
    third = ScriptedLink(fleet.dispatcher, "e3")
    assert [request.emitted_token_ids for request in third.submitted] == [[]]


# -- abort --


async def test_abort_frees_the_request_on_its_engine() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.dispatcher)
    fleet.add("a", "b")
    link.step()
    fleet.dispatcher.abort(["a", "nobody"])
    assert (link.aborted, link.running) == (["a"], ["b"])
    link.step(4)
    assert fleet.tokens == {"a": answer_to("a")[:1], "b": answer_to("b")}
    assert fleet.is_empty()


async def test_abort_of_a_waiting_request_sends_it_nowhere() -> None:
    fleet = Fleet()
    fleet.add("a", "b", "c")
    fleet.dispatcher.abort(["b"])
    assert fleet.dispatcher.num_waiting == 2
    link = ScriptedLink(fleet.dispatcher)
    assert link.running == ["a", "c"]


async def test_abort_of_a_resumed_request_reaches_the_engine_it_is_on_now() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.dispatcher, "e1"), ScriptedLink(fleet.dispatcher, "e2")
    fleet.add("r")
    first.step(2)
    first.end()
    (wire_id,) = second.running
    fleet.dispatcher.abort(["r"])
    assert (second.aborted, second.running) == ([wire_id], [])
    assert fleet.is_empty()


async def test_abort_before_the_loss_of_its_engine_is_known_leaves_nothing_to_resume() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.dispatcher, "e1"), ScriptedLink(fleet.dispatcher, "e2")
    fleet.add("r")
    first.is_broken = True
    fleet.dispatcher.abort(["r"])
    first.end()
    assert second.submitted == []
    assert fleet.is_empty()


async def test_output_on_its_way_when_the_request_is_aborted_is_dropped() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.dispatcher)
    fleet.add("r")
    late = link.make_step()
    fleet.dispatcher.abort(["r"])
    fleet.dispatcher.take_step("e1", late)
    assert fleet.sink.steps == []
    assert fleet.is_empty()


# -- deadlines and refusals --


async def test_request_that_finds_no_engine_in_time_fails_so() -> None:
    fleet = Fleet(FleetLimits(request_deadline_s=0.02, retry_after_s=7.0))
    fleet.add("r")
    async with asyncio.timeout(DEADLINE_S):
        await fleet.failed.wait()
    error = fleet.failures["r"]
    assert isinstance(error, NoEngineInTimeError)
    assert error.retry_after_s == 7.0
    assert fleet.is_empty()


async def test_deadline_of_a_lost_request_starts_when_it_begins_to_wait() -> None:
    fleet = Fleet(FleetLimits(request_deadline_s=0.05))
    link = ScriptedLink(fleet.dispatcher)
    fleet.add("r", max_tokens=1_000_000)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + 0.1  # twice the deadline, on an engine
    async with asyncio.timeout(DEADLINE_S):
        while loop.time() < until_s:
            link.step()
            await asyncio.sleep(0.01)
        assert fleet.failures == {}
        link.end()
        await fleet.failed.wait()
    assert isinstance(fleet.failures["r"], NoEngineInTimeError)


def test_deadline_grows_with_the_prompt_as_the_objective_does() -> None:
    async def main() -> None:
        fleet = Fleet(FleetLimits(request_deadline_s=5.0))
        objectives = Objectives(1.0, 0.1, ttft_per_prompt_token_s=0.02)
        fleet.dispatcher.telemetry.set_objectives(objectives)
        fleet.add("long", prompt=[1] * 100)
        fleet.add("short", prompt=[1] * 10)
        fleet.add("asks", prompt=[1] * 1000, patience_s=8.0)
        ended_s = {}
        while len(ended_s) < 3:
            fleet.failed.clear()
            await fleet.failed.wait()
            for request_id in fleet.failures.keys() - ended_s.keys():
                ended_s[request_id] = asyncio.get_running_loop().time()
        assert ended_s == {
            "short": pytest.approx(5.2),
            "long": pytest.approx(7.0),
            "asks": pytest.approx(8.0),
        }
        fleet.dispatcher.shutdown()

    run_simulated(main())


def test_engines_hear_of_the_objective_that_they_are_to_keep() -> None:
    async def main() -> None:
        fleet = Fleet(FleetLimits())
        telemetry = fleet.dispatcher.telemetry
        before = ScriptedLink(fleet.dispatcher, "before", places=1)
        assert before.wanted == RoomWanted()
        telemetry.set_objectives(Objectives(1.0, 0.1))
        fleet.dispatcher.objectives_changed()
        assert before.wanted == RoomWanted(tpot_s=0.1)
        assert ScriptedLink(fleet.dispatcher, "after", places=1).wanted == RoomWanted(tpot_s=0.1)
        telemetry.set_objectives(Objectives(1.0, 0.1), are_held=False)
        fleet.dispatcher.objectives_changed()
        assert before.wanted == RoomWanted()
        fleet.dispatcher.shutdown()

    run_simulated(main())


def test_each_waiting_request_has_a_deadline_of_its_own() -> None:
    async def main() -> None:
        await asyncio.sleep(10.0)
        fleet = Fleet(FleetLimits(request_deadline_s=5.0))
        fleet.add("first")
        await asyncio.sleep(3.0)
        fleet.add("second")
        await fleet.failed.wait()
        assert asyncio.get_running_loop().time() == pytest.approx(15.0)
        assert fleet.failures.keys() == {"first"}
        link = ScriptedLink(fleet.dispatcher)
        assert link.running == ["second"]
        fleet.dispatcher.shutdown()

    run_simulated(main())


async def test_request_too_large_for_a_frame_fails_alone() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.dispatcher)
    link.max_prompt_tokens = 3
    fleet.add("ok", "too long", "ok2")
    assert isinstance(fleet.failures["too long"], MalformedRequestError)
    link.step(5)
    assert (fleet.tokens).keys() == {"ok", "ok2"}
    assert fleet.is_empty()


async def test_request_that_its_engine_refuses_fails_alone_with_the_reason() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.dispatcher)
    fleet.add("a", "b")
    refusal = TokenOutput("a", [], int(Finish.ERROR), "malformed request payload")
    fleet.dispatcher.take_step("e1", Step([refusal]))
    assert "malformed request payload" in str(fleet.failures["a"])
    link.step(5)
    assert fleet.tokens == {"b": answer_to("b")}
    assert fleet.is_empty()


async def test_waiting_for_an_engine_ends_when_one_comes_and_at_the_timeout() -> None:
    fleet = Fleet()
    async with asyncio.timeout(DEADLINE_S):
        assert not await fleet.engine_comes(0.01)
        waiting = asyncio.create_task(fleet.engine_comes(10 * DEADLINE_S))
        await asyncio.sleep(0)
        assert fleet.dispatcher.queue.num_waiting == 1
        ScriptedLink(fleet.dispatcher)
        assert await waiting
        assert await fleet.engine_comes(0)
    assert fleet.dispatcher.queue.num_waiting == 0


async def test_draining_engine_does_not_count_as_one_to_wait_for() -> None:
    fleet = Fleet()
    ScriptedLink(fleet.dispatcher)
    fleet.dispatcher.drain_engine("e1", "scaling down", 0.0)
    assert not await fleet.engine_comes(0.01)


# -- who is to blame --


def end_whoever_holds(links: list[ScriptedLink], request_id: str, fleet: Fleet) -> int:
    """Ends engines that got `request_id`, each replaced by a new one; how many it took."""
    num_ended = 0
    while request_id not in fleet.failures:
        holder = next(
            link
            for link in links
            if any(wire_id.split("~")[0] == request_id for wire_id in link.running)
        )
        links.remove(holder)
        links.append(ScriptedLink(fleet.dispatcher, f"{holder.engine_id}'"))
        holder.end()
        num_ended += 1
    return num_ended


async def test_poison_request_fails_alone_after_its_allowance_of_engines() -> None:
    fleet = Fleet()
    links = [ScriptedLink(fleet.dispatcher, "e1"), ScriptedLink(fleet.dispatcher, "e2")]
    innocents = [f"i{number}" for number in range(10)]
    fleet.add("poison", *innocents)
    assert end_whoever_holds(links, "poison", fleet) == PATIENT.max_engine_losses
    assert fleet.failures.keys() == {"poison"}
    assert isinstance(fleet.failures["poison"], PoisonRequestError)
    while not fleet.is_empty():
        for link in links:
            link.step()
    assert fleet.tokens == {name: answer_to(name) for name in innocents}


async def test_slices_that_are_taken_away_one_after_the_other_fail_nobody() -> None:
    fleet = Fleet()
    taken = [ScriptedLink(fleet.dispatcher, f"spot-{number}") for number in range(6)]
    fleet.add(*(ids := [f"r{number}" for number in range(12)]))
    for link in taken:
        link.end(None)
    assert fleet.failures == {}
    back = ScriptedLink(fleet.dispatcher, "spot-0'")
    while not fleet.is_empty():
        back.step()
    assert fleet.tokens == {name: answer_to(name) for name in ids}


async def test_request_that_an_engine_fails_at_goes_on_without_the_failed_token() -> None:
    fleet = Fleet()
    links = [ScriptedLink(fleet.dispatcher, "e1"), ScriptedLink(fleet.dispatcher, "e2")]
    fleet.add("r", "other")
    links[0].step(2)
    links[0].fail_at("r", 999)
    (moved,) = [each for link in links for each in link.submitted if each.emitted_token_ids]
    assert moved.emitted_token_ids == answer_to("r", 2)
    while not fleet.is_empty():
        for link in links:
            link.step()
    assert fleet.tokens == {"r": answer_to("r"), "other": answer_to("other")}
    assert fleet.failures == {}


async def test_request_that_every_engine_fails_at_fails_alone() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.dispatcher)
    fleet.add("bad", "good")
    for _ in range(PATIENT.max_engine_losses):
        link.fail_at("bad")
    assert isinstance(fleet.failures["bad"], PoisonRequestError)
    link.step(5)
    assert fleet.tokens == {"good": answer_to("good")}
    assert fleet.is_empty()


async def test_request_whose_fields_leave_no_token_is_its_clients_to_change() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.dispatcher)
    fleet.add("r", forbidding_fields=["bad_words"])
    link.step(2)
    link.fail_at("r", 999)
    error = fleet.failures["r"]
    assert isinstance(error, NoTokenLeftError)
    assert "After 2 tokens" in str(error)
    assert "bad_words" in str(error)
    assert fleet.tokens == {"r": answer_to("r", 2)}
    assert fleet.is_empty()


async def test_two_poison_requests_are_tried_apart_and_both_fail() -> None:
    fleet = Fleet()
    links = [ScriptedLink(fleet.dispatcher, "e1")]
    innocents = [f"i{number}" for number in range(4)]
    fleet.add("bad", "worse", *innocents)
    for poison in ("bad", "worse"):
        end_whoever_holds(links, poison, fleet)
    assert fleet.failures.keys() == {"bad", "worse"}
    while not fleet.is_empty():
        for link in links:
            link.step()
    assert fleet.tokens == {name: answer_to(name) for name in innocents}


async def lose_twice(fleet: Fleet, *request_ids: str, max_tokens: int = 50) -> ScriptedLink:
    """Makes suspects of these requests; the engine they come to next."""
    fleet.add(*request_ids, max_tokens=max_tokens)
    for number in range(2):
        ScriptedLink(fleet.dispatcher, f"lost{number}").end()
    return ScriptedLink(fleet.dispatcher, "trial")


async def test_suspects_are_tried_one_at_a_time_beside_others() -> None:
    fleet = Fleet()
    link = await lose_twice(fleet, "a", "b", "c")
    fleet.add("innocent")
    assert [wire_id.split("~")[0] for wire_id in link.running] == ["a", "innocent"]
    assert fleet.dispatcher.num_waiting == 2


@pytest.mark.parametrize("end", ["clear", "abort", "refuse", "finish"])
async def test_end_of_a_trial_lets_the_next_suspect_in(end: str) -> None:
    fleet = Fleet()
    link = await lose_twice(fleet, "a", "b", max_tokens=2 if end == "finish" else 50)
    (wire_id,) = link.running
    if end == "clear":
        link.step(PROVING_TOKENS)
    elif end == "finish":
        link.step(2)
    elif end == "abort":
        fleet.dispatcher.abort(["a"])
    else:
        refusal = TokenOutput(wire_id, [], int(Finish.ERROR), "refused")
        fleet.dispatcher.take_step("trial", Step([refusal]))
    assert "b" in {wire_id.split("~")[0] for wire_id in link.running}
    assert fleet.dispatcher.num_waiting == 0


async def test_siblings_of_a_failed_request_are_not_moved_to_another_engine() -> None:
    fleet = Fleet()

    class Frontend(RecordingSink):
        def fail(self, request_id: str, error: RequestError) -> None:
            # As vLLM's frontend does with the samples of one `n > 1` request.
            fleet.dispatcher.abort(["0_r", "1_r", "2_r"])

    Frontend(fleet.dispatcher)
    link = await lose_twice(fleet, "1_r")
    fleet.add("0_r", "2_r", "other", max_tokens=5)
    assert len(link.running) == 4
    last = ScriptedLink(fleet.dispatcher, "last")
    link.end()
    assert {wire_id.split("~")[0] for wire_id in last.running} == {"other"}
    last.step(5)
    assert fleet.is_empty()


# -- the end --


def test_shutdown_forgets_everything() -> None:
    async def main() -> None:
        await asyncio.sleep(10.0)
        fleet = Fleet(FleetLimits(request_deadline_s=5.0))
        fleet.add("a")
        fleet.dispatcher.shutdown()
        assert fleet.is_empty()
        await asyncio.sleep(10.0)
        assert fleet.failures == {}

    run_simulated(main())


async def test_end_of_a_drained_engine_counts_against_no_request() -> None:
    fleet = Fleet()
    fleet.add("r")
    for number in range(FleetLimits().max_engine_losses + 1):
        link = ScriptedLink(fleet.dispatcher, f"e{number}")
        fleet.dispatcher.drain_engine(f"e{number}", "the replica is leaving", 0.0)
        link.end()
    assert fleet.failures == {}
    assert fleet.dispatcher.num_waiting == 1


# -- load, as a scaling policy is told it --


async def test_load_counts_what_waits_and_what_is_on_engines() -> None:
    fleet = Fleet()
    fleet.add("a", "b")
    waiting = fleet.load
    assert (waiting.num_waiting, waiting.num_in_flight) == (2, 0)
    assert waiting.oldest_wait_s >= 0.0
    assert waiting.output_tokens_mean is None
    link = ScriptedLink(fleet.dispatcher)
    running = fleet.load
    assert (running.num_waiting, running.oldest_wait_s, running.num_in_flight) == (0, 0.0, 2)
    link.step(5)
    done = fleet.load
    assert (done.num_waiting, done.num_in_flight) == (0, 0)
    assert (done.input_tokens_mean, done.output_tokens_mean) == (1.0, 5.0)
    assert done.requests_per_s == waiting.requests_per_s == pytest.approx(2 / 5)


async def test_request_in_the_queue_is_load_once_before_and_after_it_goes_in() -> None:
    fleet = Fleet()
    queued = asyncio.create_task(fleet.engine_comes(DEADLINE_S))
    await asyncio.sleep(0)
    before = fleet.load
    assert (before.num_waiting, before.num_in_flight) == (1, 0)
    ScriptedLink(fleet.dispatcher)
    assert await queued
    fleet.add("r")
    after = fleet.load
    assert (after.num_waiting, after.num_in_flight) == (0, 1)
    assert after.requests_per_s == before.requests_per_s == pytest.approx(1 / 5)


async def test_request_that_is_rejected_is_load() -> None:
    fleet = Fleet()
    fleet.dispatcher.queue.reject(ServiceClass.STANDARD)
    assert fleet.load.requests_per_s == pytest.approx(1 / 5)
    assert fleet.load.num_waiting == 0


async def test_aborted_request_does_not_make_answers_shorter() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.dispatcher)
    fleet.add("whole", max_tokens=9)
    link.step(9)
    assert fleet.load.output_tokens_mean == 9.0
    fleet.add("cut", max_tokens=9)
    link.step(3)
    fleet.dispatcher.abort(["cut"])
    assert fleet.load.output_tokens_mean == 9.0


async def test_batch_work_is_told_apart_and_makes_no_engine_full() -> None:
    fleet = Fleet()
    ScriptedLink(fleet.dispatcher, places=1)
    fleet.add("b1", "b2", service_class=ServiceClass.BATCH)
    load = fleet.load
    assert (load.num_waiting, load.num_in_flight, load.oldest_wait_s) == (0, 0, 0.0)
    assert (load.num_batch_waiting, load.num_batch_in_flight) == (1, 1)
    assert load.full_ratio == 0.0


async def test_engines_are_full_for_as_long_as_work_waits_for_them() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.dispatcher, places=1)
    fleet.add("running", "waiting")
    now_s = time.monotonic()
    assert fleet.dispatcher.full_ratio(now_s + 15.0) == pytest.approx(0.5, abs=0.05)
    assert fleet.dispatcher.full_ratio(now_s + 40.0) == 1.0
    link.step(5)
    link.step(5)
    assert fleet.dispatcher.num_waiting == 0
    assert fleet.dispatcher.full_ratio(time.monotonic() + 15.0) < 0.1


async def test_refused_client_learns_when_the_next_engine_comes() -> None:
    fleet = Fleet(FleetLimits(retry_after_s=7.0))
    assert fleet.dispatcher.queue.retry_after_s == 7.0
    fleet.dispatcher.queue.expect_engine(600.0)
    assert 500.0 < fleet.dispatcher.queue.retry_after_s <= 600.0
    assert fleet.dispatcher.queue.no_engine_in_time(1.0).retry_after_s > 500.0
    fleet.dispatcher.queue.expect_engine(0.0)
    assert fleet.dispatcher.queue.retry_after_s == 7.0, "that time is over"
    fleet.dispatcher.queue.expect_engine(None)
    assert fleet.dispatcher.queue.retry_after_s == 7.0


async def test_requests_that_are_over_are_let_go() -> None:
    """Also where none of them ever had to wait, and their first tokens were not due yet."""
    dispatcher = Dispatcher("demo", FleetLimits())
    RecordingSink(dispatcher)
    link = ScriptedLink(dispatcher)
    for number in range(500):
        dispatcher.submit(in_flight(dispatcher, f"over-{number}", 1))
        link.step()
    assert dispatcher.num_in_flight == 0
    kept = [each for each in gc.get_objects() if type(each) is InFlightRequest]
    assert sum(each.request_id.startswith("over-") for each in kept) < 100
