"""The fleet client over scripted engines: dispatch, resume, abort, deadlines, blame, adapters."""

import asyncio

import pytest
import torch
from vllm.v1.engine import EngineCoreOutput, FinishReason

from serving.domain.errors import (
    CannotResumeError,
    MalformedRequestError,
    NoEngineInTimeError,
    PoisonRequestError,
    RequestError,
)
from serving.gateway.fleet_core import FleetCore, FleetLimits
from serving.gateway.flights import CLEARING_TOKENS
from serving.link.messages import EngineLoad, Finish, Step, TokenOutput
from serving.link.vllm_codec import decode_request, request_decoder
from tests.engine.simulated_time import run_simulated

from .engines import ScriptedLink, answer_to, core_request

pytestmark = pytest.mark.imports_vllm

DEADLINE_S = 10.0
PATIENT = FleetLimits(request_deadline_s=600.0)


class Fleet:
    """A fleet client, what it delivered, and whom it failed."""

    def __init__(self, limits: FleetLimits = PATIENT) -> None:
        self.core = FleetCore("demo", limits, ("generate",))
        self.failures: dict[str, RequestError] = {}
        self.failed = asyncio.Event()
        self.core.set_failure_sink(self._on_failure)

    def _on_failure(self, request_id: str, error: RequestError) -> None:
        assert request_id not in self.failures, "told twice"
        self.failures[request_id] = error
        self.failed.set()

    async def engine_comes(self, in_s: float) -> bool:
        """As a request at the door waits for an engine."""
        return await self.core.door.wait(lambda: self.core.has_engine, in_s)

    async def add(self, *request_ids: str, max_tokens: int = 5) -> None:
        for request_id in request_ids:
            await self.core.add_request_async(core_request(request_id, max_tokens))

    async def delivered(self) -> list[EngineCoreOutput]:
        """What has come for vLLM's frontend, in order."""
        outputs: list[EngineCoreOutput] = []
        async with asyncio.timeout(DEADLINE_S):
            while not self.core._outputs.empty():
                outputs += (await self.core.get_output_async()).outputs
        return outputs

    async def tokens(self) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        for output in await self.delivered():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        return tokens

    @property
    def num_resumes(self) -> int:
        meters = self.core.request_meter.classes.values()
        return sum(count for meter in meters for count in meter.resumes.values())

    def is_empty(self) -> bool:
        return (
            self.core.num_in_flight == 0
            and self.core.num_waiting == 0
            and all(not seat.flights for seat in self.core.seats)
        )


# -- the undisturbed way --


async def test_request_runs_on_one_engine_and_leaves_nothing_behind() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.core)
    await fleet.add("r")
    link.step(5)
    outputs = await fleet.delivered()
    assert [output.new_token_ids[0] for output in outputs] == answer_to("r")
    assert {output.request_id for output in outputs} == {"r"}
    assert [output.finish_reason for output in outputs][-2:] == [None, FinishReason.LENGTH]
    assert fleet.is_empty()


async def test_requests_spread_over_the_engines() -> None:
    fleet = Fleet()
    links = [ScriptedLink(fleet.core, f"e{i}") for i in range(3)]
    await fleet.add(*"abcdef")
    assert [len(link.submitted) for link in links] == [2, 2, 2]


async def test_one_step_of_an_engine_is_one_delivery() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.core)
    await fleet.add("a", "b", "c")
    link.step()
    outputs = await fleet.core.get_output_async()
    assert [output.request_id for output in outputs.outputs] == ["a", "b", "c"]


async def test_step_tells_how_busy_its_engine_is() -> None:
    fleet = Fleet()
    ScriptedLink(fleet.core)
    fleet.core.take_step("e1", Step([], EngineLoad(3, 2, 0.5)))
    assert fleet.core.seats[0].load == EngineLoad(3, 2, 0.5)


async def test_step_of_an_unknown_engine_is_ignored() -> None:
    fleet = Fleet()
    fleet.core.take_step("nobody", Step([TokenOutput("r", [1])]))
    assert await fleet.delivered() == []


# -- resume --


def aborts(*wire_ids: str) -> Step:
    """What vLLM's engine core says of each request when it is told to end."""
    return Step([TokenOutput(wire_id, [], int(Finish.ABORT)) for wire_id in wire_ids])


@pytest.mark.parametrize("is_told", [True, False])
async def test_request_that_its_engine_gives_up_goes_on_at_another(*, is_told: bool) -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.core, "e1"), ScriptedLink(fleet.core, "e2")
    await fleet.add("r", "s", "t")
    first.step(2)
    second.step(1)
    # Of "r" and "t", which are on it, it says one to be aborted, and the other nothing.
    fleet.core.take_step("e1", aborts("r"))
    assert [(each.request_id, each.emitted_token_ids) for each in second.submitted[1:]] == [
        ("t~1", answer_to("t")[:2]),
        ("r~1", answer_to("r")[:2]),
    ]
    await fleet.add("u")  # comes to the engine that has not said that it ends
    assert [each.request_id for each in first.submitted] == ["r", "t"]
    first.end(is_told=is_told)
    second.step(5)
    tokens = await fleet.tokens()
    assert tokens == {name: answer_to(name) for name in "rstu"}
    assert fleet.failures == {}
    assert fleet.is_empty()


async def test_request_that_the_last_engine_gives_up_waits_for_the_next() -> None:
    fleet = Fleet()
    first = ScriptedLink(fleet.core, "e1")
    await fleet.add("r")
    first.step(2)
    fleet.core.take_step("e1", aborts("r"))
    assert fleet.core.num_waiting == 1
    second = ScriptedLink(fleet.core, "e2")
    second.step(3)
    assert await fleet.tokens() == {"r": answer_to("r")}
    assert fleet.failures == {}


async def test_abort_that_the_client_asked_for_moves_nothing() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.core, "e1"), ScriptedLink(fleet.core, "e2")
    await fleet.add("r")
    first.step(1)
    await fleet.core.abort_requests_async(["r"])
    fleet.core.take_step("e1", aborts("r"))
    assert second.submitted == []
    assert fleet.core.has_engine
    assert all(not seat.is_draining for seat in fleet.core.seats)
    assert fleet.is_empty()


@pytest.mark.parametrize("position", range(5))
async def test_request_continues_token_exactly_where_its_engine_died(position: int) -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.core, "e1"), ScriptedLink(fleet.core, "e2")
    await fleet.add("r")
    first.step(position)
    first.end()
    (resumed,) = second.submitted
    assert resumed.emitted_token_ids == answer_to("r")[:position]
    assert (resumed.prompt_token_ids, resumed.max_tokens) == (list(b"r"), 5)
    second.step(5 - position)
    assert await fleet.tokens() == {"r": answer_to("r")}
    assert fleet.num_resumes == 1
    assert fleet.is_empty()


async def test_request_survives_one_engine_after_another() -> None:
    fleet = Fleet()
    await fleet.add("r", max_tokens=100)
    for number in range(10):
        link = ScriptedLink(fleet.core, f"e{number}")
        link.step(CLEARING_TOKENS)
        link.end()
    ScriptedLink(fleet.core, "last").step(20)
    assert await fleet.tokens() == {"r": answer_to("r", 100)}
    assert fleet.failures == {}
    assert fleet.is_empty()


async def test_without_another_engine_the_request_waits_for_one() -> None:
    fleet = Fleet()
    first = ScriptedLink(fleet.core, "e1")
    await fleet.add("r")
    first.step(2)
    first.end()
    assert fleet.core.num_waiting == 1
    second = ScriptedLink(fleet.core, "e2")
    assert fleet.core.num_waiting == 0
    second.step(3)
    assert await fleet.tokens() == {"r": answer_to("r")}


async def test_drained_engine_gives_its_requests_back_and_is_not_blamed() -> None:
    fleet = Fleet(FleetLimits(request_deadline_s=600.0, max_engine_losses=1))
    first, second = ScriptedLink(fleet.core, "e1"), ScriptedLink(fleet.core, "e2")
    await fleet.add("a", "b")
    first.step(2)
    fleet.core.drain_engine("e1", "scaling down", 0.0)
    assert first.aborted == ["a"]
    second.step(5)
    assert await fleet.tokens() == {"a": answer_to("a"), "b": answer_to("b")}
    await fleet.add("c")
    assert [request.request_id for request in first.submitted] == ["a"]
    assert fleet.failures == {}


async def test_drained_engine_keeps_what_it_can_finish_in_time() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.core, "e1"), ScriptedLink(fleet.core, "e2")
    await fleet.add("a", "b")
    first.step(2)
    fleet.core.drain_engine("e1", "preempted", 60.0)
    assert first.aborted == []
    first.step(3)
    second.step(5)
    assert await fleet.tokens() == {"a": answer_to("a"), "b": answer_to("b")}
    assert fleet.num_resumes == 0


async def test_what_a_drained_engine_did_not_finish_after_all_moves_before_its_end() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.core, "e1"), ScriptedLink(fleet.core, "e2")
    await fleet.add("a")
    first.step(2)
    fleet.core.drain_engine("e1", "preempted", 0.6)
    async with asyncio.timeout(10):
        while not second.submitted:  # noqa: ASYNC110 - the link has no event for it
            await asyncio.sleep(0.01)
    assert first.aborted == ["a"]
    second.step(3)
    assert await fleet.tokens() == {"a": answer_to("a")}


async def test_requests_leave_a_drained_engine_when_another_one_comes() -> None:
    fleet = Fleet()
    first = ScriptedLink(fleet.core, "e1")
    await fleet.add("a")
    fleet.core.drain_engine("e1", "preempted", 60.0)
    assert first.aborted == []
    second = ScriptedLink(fleet.core, "e2")
    assert first.aborted == ["a"]
    second.step(5)
    assert await fleet.tokens() == {"a": answer_to("a")}


async def test_draining_without_an_end_moves_nothing_until_the_end_is_said() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.core, "e1"), ScriptedLink(fleet.core, "e2")
    await fleet.add("a")
    fleet.core.drain_engine("e1", "listed as draining", None)
    assert (first.aborted, fleet.core.seats[0].is_draining) == ([], True)
    fleet.core.drain_engine("e1", "preempted", 0.0)
    assert (first.aborted, len(second.submitted)) == (["a"], 1)


async def test_what_an_engine_sends_of_an_earlier_attempt_is_ignored() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.core, "e1"), ScriptedLink(fleet.core, "e2")
    await fleet.add("r")
    first.step(2)
    late = first.make_step()
    fleet.core.drain_engine("e1", "scaling down", 0.0)
    fleet.core.take_step("e1", late)
    second.step(1)
    fleet.core.take_step("e1", late)
    second.step(2)
    assert await fleet.tokens() == {"r": answer_to("r")}
    assert fleet.is_empty()


async def test_request_given_to_a_link_that_just_broke_moves_with_its_loss() -> None:
    fleet = Fleet()
    first = ScriptedLink(fleet.core, "e1")
    first.is_broken = True
    await fleet.add("r")
    assert (fleet.core.num_in_flight, fleet.core.num_waiting) == (1, 0)
    second = ScriptedLink(fleet.core, "e2")
    first.end()
    second.step(5)
    assert await fleet.tokens() == {"r": answer_to("r")}


async def test_prompt_logprobs_are_asked_for_only_until_the_first_token() -> None:
    fleet = Fleet()
    await fleet.core.add_request_async(core_request("r", prompt_logprobs=1, logprobs=2))
    asked = []
    for number, num_steps in enumerate([0, 2, 1]):
        link = ScriptedLink(fleet.core, f"e{number}")
        link.step(num_steps)
        params = decode_request(link.submitted[0], request_decoder()).sampling_params
        assert params is not None
        asked.append((params.prompt_logprobs, params.logprobs))
        link.end()
    assert asked == [(1, 2), (1, 2), (None, 2)]


async def test_prompt_given_as_embeddings_is_not_resumed_once_it_has_emitted() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.core, "e1"), ScriptedLink(fleet.core, "e2")
    for request_id in ("a", "b", "c"):
        request = core_request(request_id)
        request.prompt_embeds = torch.zeros(2, 4)
        await fleet.core.add_request_async(request)
    first.step()  # "a" and "c" have emitted
    fleet.core.take_step("e2", Step([]))
    first.end()
    assert {key: type(error) for key, error in fleet.failures.items()} == {
        "a": CannotResumeError,
        "c": CannotResumeError,
    }
    second.end()
    third = ScriptedLink(fleet.core, "e3")
    assert [request.emitted_token_ids for request in third.submitted] == [[]]


# -- abort --


async def test_abort_frees_the_request_on_its_engine() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.core)
    await fleet.add("a", "b")
    link.step()
    await fleet.core.abort_requests_async(["a", "nobody"])
    assert (link.aborted, link.running) == (["a"], ["b"])
    link.step(4)
    assert await fleet.tokens() == {"a": answer_to("a")[:1], "b": answer_to("b")}
    assert fleet.is_empty()


async def test_abort_of_a_waiting_request_sends_it_nowhere() -> None:
    fleet = Fleet()
    await fleet.add("a", "b", "c")
    fleet.core.abort_requests(["b"])
    assert fleet.core.num_waiting == 2
    link = ScriptedLink(fleet.core)
    assert link.running == ["a", "c"]


async def test_abort_of_a_resumed_request_reaches_the_engine_it_is_on_now() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.core, "e1"), ScriptedLink(fleet.core, "e2")
    await fleet.add("r")
    first.step(2)
    first.end()
    (wire_id,) = second.running
    fleet.core.abort_requests(["r"])
    assert (second.aborted, second.running) == ([wire_id], [])
    assert fleet.is_empty()


async def test_abort_before_the_loss_of_its_engine_is_known_leaves_nothing_to_resume() -> None:
    fleet = Fleet()
    first, second = ScriptedLink(fleet.core, "e1"), ScriptedLink(fleet.core, "e2")
    await fleet.add("r")
    first.is_broken = True
    fleet.core.abort_requests(["r"])
    first.end()
    assert second.submitted == []
    assert fleet.is_empty()


async def test_output_on_its_way_when_the_request_is_aborted_is_dropped() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.core)
    await fleet.add("r")
    late = link.make_step()
    fleet.core.abort_requests(["r"])
    fleet.core.take_step("e1", late)
    assert await fleet.delivered() == []
    assert fleet.is_empty()


# -- deadlines and refusals --


async def test_request_that_finds_no_engine_in_time_is_told_so() -> None:
    fleet = Fleet(FleetLimits(request_deadline_s=0.02, retry_after_s=7.0))
    await fleet.add("r")
    async with asyncio.timeout(DEADLINE_S):
        await fleet.failed.wait()
    error = fleet.failures["r"]
    assert isinstance(error, NoEngineInTimeError)
    assert error.retry_after_s == 7.0
    assert fleet.is_empty()


async def test_deadline_of_a_lost_request_starts_when_it_begins_to_wait() -> None:
    fleet = Fleet(FleetLimits(request_deadline_s=0.05))
    link = ScriptedLink(fleet.core)
    await fleet.add("r", max_tokens=1_000_000)
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


def test_each_waiting_request_has_a_deadline_of_its_own() -> None:
    async def main() -> None:
        await asyncio.sleep(10.0)
        fleet = Fleet(FleetLimits(request_deadline_s=5.0))
        await fleet.add("first")
        await asyncio.sleep(3.0)
        await fleet.add("second")
        await fleet.failed.wait()
        assert asyncio.get_running_loop().time() == pytest.approx(15.0)
        assert fleet.failures.keys() == {"first"}
        link = ScriptedLink(fleet.core)
        assert link.running == ["second"]
        fleet.core.shutdown()

    run_simulated(main())


async def test_request_too_large_for_a_frame_fails_alone() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.core)
    link.max_prompt_tokens = 3
    await fleet.add("ok", "too long", "ok2")
    assert isinstance(fleet.failures["too long"], MalformedRequestError)
    link.step(5)
    assert (await fleet.tokens()).keys() == {"ok", "ok2"}
    assert fleet.is_empty()


async def test_request_that_its_engine_refuses_fails_alone_with_the_reason() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.core)
    await fleet.add("a", "b")
    refusal = TokenOutput("a", [], int(Finish.ERROR), "malformed request payload")
    fleet.core.take_step("e1", Step([refusal]))
    assert "malformed request payload" in str(fleet.failures["a"])
    link.step(5)
    assert await fleet.tokens() == {"b": answer_to("b")}
    assert fleet.is_empty()


async def test_waiting_for_an_engine_ends_when_one_comes_and_at_the_timeout() -> None:
    fleet = Fleet()
    async with asyncio.timeout(DEADLINE_S):
        assert not await fleet.engine_comes(0.01)
        waiting = asyncio.create_task(fleet.engine_comes(10 * DEADLINE_S))
        await asyncio.sleep(0)
        assert fleet.core.door.num_waiting == 1
        ScriptedLink(fleet.core)
        assert await waiting
        assert await fleet.engine_comes(0)
    assert fleet.core.door.num_waiting == 0


async def test_draining_engine_does_not_count_as_one_to_wait_for() -> None:
    fleet = Fleet()
    ScriptedLink(fleet.core)
    fleet.core.drain_engine("e1", "scaling down", 0.0)
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
        links.append(ScriptedLink(fleet.core, f"{holder.engine_id}'"))
        holder.end()
        num_ended += 1
    return num_ended


async def test_poison_request_fails_alone_after_its_allowance_of_engines() -> None:
    fleet = Fleet()
    links = [ScriptedLink(fleet.core, "e1"), ScriptedLink(fleet.core, "e2")]
    innocents = [f"i{number}" for number in range(10)]
    await fleet.add("poison", *innocents)
    assert end_whoever_holds(links, "poison", fleet) == PATIENT.max_engine_losses
    assert fleet.failures.keys() == {"poison"}
    assert isinstance(fleet.failures["poison"], PoisonRequestError)
    while not fleet.is_empty():
        for link in links:
            link.step()
    assert await fleet.tokens() == {each: answer_to(each) for each in innocents}


async def test_slices_that_are_taken_away_one_after_the_other_fail_nobody() -> None:
    fleet = Fleet()
    taken = [ScriptedLink(fleet.core, f"spot-{number}") for number in range(6)]
    await fleet.add(*(ids := [f"r{number}" for number in range(12)]))
    for link in taken:
        link.end(is_told=False)
    assert fleet.failures == {}
    back = ScriptedLink(fleet.core, "spot-0'")
    while not fleet.is_empty():
        back.step()
    assert await fleet.tokens() == {each: answer_to(each) for each in ids}


async def test_two_poison_requests_are_tried_apart_and_both_fail() -> None:
    fleet = Fleet()
    links = [ScriptedLink(fleet.core, "e1")]
    innocents = [f"i{number}" for number in range(4)]
    await fleet.add("bad", "worse", *innocents)
    for poison in ("bad", "worse"):
        end_whoever_holds(links, poison, fleet)
    assert fleet.failures.keys() == {"bad", "worse"}
    while not fleet.is_empty():
        for link in links:
            link.step()
    assert await fleet.tokens() == {each: answer_to(each) for each in innocents}


async def lose_twice(fleet: Fleet, *request_ids: str, max_tokens: int = 50) -> ScriptedLink:
    """Makes suspects of these requests; the engine they come to next."""
    await fleet.add(*request_ids, max_tokens=max_tokens)
    for number in range(2):
        ScriptedLink(fleet.core, f"lost{number}").end()
    return ScriptedLink(fleet.core, "trial")


async def test_suspects_are_tried_one_at_a_time_beside_others() -> None:
    fleet = Fleet()
    link = await lose_twice(fleet, "a", "b", "c")
    await fleet.add("innocent")
    assert [wire_id.split("~")[0] for wire_id in link.running] == ["a", "innocent"]
    assert fleet.core.num_waiting == 2


@pytest.mark.parametrize("end", ["clear", "abort", "refuse", "finish"])
async def test_end_of_a_trial_lets_the_next_suspect_in(end: str) -> None:
    fleet = Fleet()
    link = await lose_twice(fleet, "a", "b", max_tokens=2 if end == "finish" else 50)
    (wire_id,) = link.running
    if end == "clear":
        link.step(CLEARING_TOKENS)
    elif end == "finish":
        link.step(2)
    elif end == "abort":
        fleet.core.abort_requests(["a"])
    else:
        refusal = TokenOutput(wire_id, [], int(Finish.ERROR), "refused")
        fleet.core.take_step("trial", Step([refusal]))
    assert "b" in {each.split("~")[0] for each in link.running}
    assert fleet.core.num_waiting == 0


async def test_siblings_of_a_failed_request_are_not_moved_to_another_engine() -> None:
    fleet = Fleet()

    def fail(request_id: str, error: RequestError) -> None:
        # As vLLM's frontend does with the samples of one `n > 1` request.
        fleet.core.abort_requests(["0_r", "1_r", "2_r"])

    fleet.core.set_failure_sink(fail)
    link = await lose_twice(fleet, "1_r")
    await fleet.add("0_r", "2_r", "other", max_tokens=5)
    assert len(link.running) == 4
    last = ScriptedLink(fleet.core, "last")
    link.end()
    assert {wire_id.split("~")[0] for wire_id in last.running} == {"other"}
    last.step(5)
    assert fleet.is_empty()


# -- operations on all engines --


async def test_operation_reaches_every_engine() -> None:
    fleet = Fleet()
    links = [ScriptedLink(fleet.core, f"e{i}") for i in range(2)]
    assert await fleet.core.reset_prefix_cache_async()
    assert await fleet.core.remove_lora_async(7)
    assert [link.calls for link in links] == [
        [("reset_prefix_cache", [False, False]), ("remove_lora", [7])]
    ] * 2


def test_shutdown_forgets_everything() -> None:
    async def main() -> None:
        await asyncio.sleep(10.0)
        fleet = Fleet(FleetLimits(request_deadline_s=5.0))
        await fleet.add("a")
        fleet.core.shutdown()
        assert fleet.is_empty()
        await asyncio.sleep(10.0)
        assert fleet.failures == {}

    run_simulated(main())


async def test_end_of_a_drained_engine_counts_against_no_request() -> None:
    fleet = Fleet()
    await fleet.core.add_request_async(core_request("r"))
    for number in range(FleetLimits().max_engine_losses + 1):
        link = ScriptedLink(fleet.core, f"e{number}")
        fleet.core.drain_engine(f"e{number}", "the replica is leaving", 0.0)
        link.end()
    assert fleet.failures == {}
    assert fleet.core.num_waiting == 1


# -- load, as a scaling policy is told it --


async def test_load_counts_what_waits_and_what_is_on_engines() -> None:
    fleet = Fleet()
    await fleet.add("a", "b")
    waiting = fleet.core.load
    assert (waiting.num_waiting, waiting.num_in_flight) == (2, 0)
    assert waiting.oldest_wait_s >= 0.0
    assert waiting.output_tokens_mean is None
    link = ScriptedLink(fleet.core)
    running = fleet.core.load
    assert (running.num_waiting, running.oldest_wait_s, running.num_in_flight) == (0, 0.0, 2)
    link.step(5)
    done = fleet.core.load
    assert (done.num_waiting, done.num_in_flight) == (0, 0)
    assert (done.input_tokens_mean, done.output_tokens_mean) == (1.0, 5.0)
    assert done.requests_per_s == waiting.requests_per_s == pytest.approx(2 / 5)


async def test_request_at_the_door_is_load_once_before_and_after_it_goes_in() -> None:
    fleet = Fleet()
    door = asyncio.create_task(fleet.engine_comes(DEADLINE_S))
    await asyncio.sleep(0)
    before = fleet.core.load
    assert (before.num_waiting, before.num_in_flight) == (1, 0)
    ScriptedLink(fleet.core)
    assert await door
    await fleet.add("r")
    after = fleet.core.load
    assert (after.num_waiting, after.num_in_flight) == (0, 1)
    assert after.requests_per_s == before.requests_per_s == pytest.approx(1 / 5)


async def test_request_that_is_turned_away_is_load() -> None:
    fleet = Fleet()
    fleet.core.door.turn_away()
    assert fleet.core.load.requests_per_s == pytest.approx(1 / 5)
    assert fleet.core.load.num_waiting == 0


async def test_aborted_request_has_cost_what_it_emitted() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.core)
    await fleet.add("r", max_tokens=9)
    link.step(3)
    fleet.core.abort_requests(["r"])
    assert fleet.core.load.output_tokens_mean == 3.0


async def test_refused_client_is_told_when_the_next_engine_comes() -> None:
    fleet = Fleet(FleetLimits(retry_after_s=7.0))
    assert fleet.core.door.retry_after_s == 7.0
    fleet.core.door.expect_engine(600.0)
    assert 500.0 < fleet.core.door.retry_after_s <= 600.0
    assert fleet.core.door.no_engine_in_time().retry_after_s > 500.0
    fleet.core.door.expect_engine(0.0)
    assert fleet.core.door.retry_after_s == 7.0, "that time is over"
    fleet.core.door.expect_engine(None)
    assert fleet.core.door.retry_after_s == 7.0


async def test_tokens_that_nobody_takes_make_the_gateway_late() -> None:
    fleet = Fleet()
    link = ScriptedLink(fleet.core)
    await fleet.add("a")
    assert fleet.core.behind_s == 0.0
    link.step()
    first_s = fleet.core.behind_s
    link.step()
    assert fleet.core.behind_s >= first_s > 0.0
    await fleet.delivered()
    assert fleet.core.behind_s == 0.0
