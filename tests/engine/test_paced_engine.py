import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.domain.tokens.paced import paced_token, paced_tokens
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from serving.link.engine_protocol import EngineDiedError
from serving.link.messages import Finish, TokenRequest

from .contract import DEADLINE_S, EngineContract, Subject, collect
from .simulated_time import run_simulated

RANGE = PacedConfig().token_range
PROMPT = [1, 2, 3]


def request(
    request_id: str = "a", max_tokens: int | None = 3, prompt: list[int] | None = None
) -> TokenRequest:
    return TokenRequest(request_id, prompt or PROMPT, max_tokens=max_tokens)


class TestPacedEngine(EngineContract):
    @pytest.fixture
    async def subject(self) -> AsyncIterator[Subject]:
        engine = PacedEngine(PacedConfig())
        yield Subject(
            engine,
            lambda request_id, max_tokens, emitted: TokenRequest(
                request_id, PROMPT, emitted, max_tokens
            ),
            PacedConfig().max_num_seqs,
        )
        await engine.close()


@pytest.fixture
async def engine() -> AsyncIterator[PacedEngine]:
    engine = PacedEngine(PacedConfig(max_num_seqs=2, max_model_len=8))
    yield engine
    await engine.close()


@given(
    st.lists(st.integers(0, 200_000), min_size=1, max_size=50),
    st.integers(0, 10_000),
    st.integers(0, 1000),
    st.integers(1, 1000),
)
def test_token_is_always_within_its_range(
    prompt: list[int], position: int, low: int, width: int
) -> None:
    assert low <= paced_token(prompt, position, (low, low + width)) < low + width


def test_tokens_tell_prompts_and_positions_apart() -> None:
    streams = {
        tuple(paced_token([prompt, 7], position, RANGE) for position in range(20))
        for prompt in range(200)
    }
    assert len(streams) == 200
    assert all(len(set(stream)) > 5 for stream in streams)


async def test_tokens_are_those_of_the_pure_function(engine: PacedEngine) -> None:
    await engine.submit(request(max_tokens=4))
    tokens = await collect(engine, "a")
    assert tokens["a"] == [paced_token(PROMPT, position, RANGE) for position in range(4)]


async def test_request_without_room_left_finishes_at_the_model_length(engine: PacedEngine) -> None:
    await engine.submit(request(max_tokens=100))
    assert len((await collect(engine, "a"))["a"]) == 8 - len(PROMPT)


async def test_pooling_request_finishes_with_one_empty_output(engine: PacedEngine) -> None:
    await engine.submit(request(max_tokens=None))
    (output,) = await engine.next_step()
    assert (output.token_ids, output.finish) == ([], Finish.STOP)


async def test_requests_beyond_the_slots_wait_for_one(engine: PacedEngine) -> None:
    for name in "abc":
        await engine.submit(request(name, max_tokens=2))
    assert (engine.load.num_running, engine.load.num_waiting) == (2, 1)
    assert [output.request_id for output in await engine.next_step()] == ["a", "b"]
    assert len((await collect(engine, "a", "b", "c"))["c"]) == 2
    assert (engine.load.num_running, engine.load.num_waiting) == (0, 0)


async def test_abort_gives_its_slot_to_the_next(engine: PacedEngine) -> None:
    for name in "abc":
        await engine.submit(request(name, max_tokens=2))
    await engine.abort(["a"])
    await collect(engine, "b", "c")
    assert engine.load.num_running == 0


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (TokenRequest("x", [], max_tokens=1), "empty prompt"),
        (TokenRequest("x", [256], max_tokens=1), "0..255"),
        (TokenRequest("x", [1] * 8, max_tokens=1), "max_model_len is 8"),
        (TokenRequest("x", [1], [97, 98], max_tokens=2), "already emitted"),
        (TokenRequest("live", [1], max_tokens=2), "already here"),
    ],
)
async def test_request_that_cannot_be_served_is_refused(
    engine: PacedEngine, bad: TokenRequest, reason: str
) -> None:
    await engine.submit(request("live"))
    with pytest.raises(ValueError, match=reason):
        await engine.submit(bad)
    assert len((await collect(engine, "live"))["live"]) == 3


@pytest.mark.parametrize(
    ("damage", "position"),
    [
        pytest.param(lambda whole: [*whole[:2], 0], 2, id="another token"),
        pytest.param(lambda whole: whole[1:4], 0, id="the first one lost"),
        pytest.param(lambda whole: [whole[0], *whole[:2]], 1, id="one repeated"),
        pytest.param(lambda whole: [whole[0], whole[2], whole[1]], 1, id="two exchanged"),
    ],
)
async def test_resume_after_tokens_that_were_never_emitted_is_refused(
    engine: PacedEngine, damage: Callable[[list[int]], list[int]], position: int
) -> None:
    whole = paced_tokens(PROMPT, 4, RANGE)
    assert len(set(whole)) == 4
    with pytest.raises(ValueError, match=f"emitted token {position} is"):
        await engine.submit(TokenRequest("x", PROMPT, damage(whole), max_tokens=4))
    await engine.submit(TokenRequest("x", PROMPT, whole[:3], max_tokens=4))
    assert (await collect(engine, "x"))["x"] == whole[3:]


async def test_resume_of_what_another_model_emitted_is_refused() -> None:
    engine = PacedEngine(PacedConfig(model_seed=1))
    with pytest.raises(ValueError, match="emitted token 0 is"):
        await engine.submit(TokenRequest("x", PROMPT, paced_tokens(PROMPT, 3, RANGE), 5))
    emitted = paced_tokens(PROMPT, 3, RANGE, model_seed=1)
    await engine.submit(TokenRequest("x", PROMPT, emitted, 5))


async def test_failed_submit_refuses_one_request_only(engine: PacedEngine) -> None:
    engine.fail_submit("out of luck")
    with pytest.raises(ValueError, match="out of luck"):
        await engine.submit(request())
    await engine.submit(request())
    assert len((await collect(engine, "a"))["a"]) == 3


async def test_death_reaches_a_waiting_step_and_everything_after(engine: PacedEngine) -> None:
    step = asyncio.create_task(engine.next_step())
    await asyncio.sleep(0)
    engine.die("chip fell off")
    with pytest.raises(EngineDiedError, match="chip fell off"):
        await asyncio.wait_for(step, DEADLINE_S)
    with pytest.raises(EngineDiedError, match="chip fell off"):
        await engine.submit(request())
    with pytest.raises(EngineDiedError, match="chip fell off"):
        await engine.check(1)


async def test_poisoned_prompt_kills_the_engine_once_it_gets_a_slot(engine: PacedEngine) -> None:
    engine.poison(66)
    for name in "ab":
        await engine.submit(request(name, max_tokens=2))
    await engine.submit(request("poisoned", prompt=[65, 66]))
    await engine.check(1)
    with pytest.raises(EngineDiedError, match="request poisoned"):
        await collect(engine, "poisoned")


async def test_call_runs_the_named_operation() -> None:
    engine = PacedEngine(PacedConfig(), {"reverse": lambda args: args[::-1]})
    assert await engine.call("reverse", b"abc") == b"cba"


@pytest.mark.parametrize(
    "settings",
    [
        {"token_range": (10, 10)},
        {"token_range": (0, 300)},
        {"ttft_s": -1.0},
        {"max_num_seqs": 0},
        {"max_model_len": 1},
    ],
)
def test_config_out_of_range_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        PacedConfig(**settings)  # type: ignore[arg-type]


async def emission_times(engine: PacedEngine, *request_ids: str) -> dict[str, list[float]]:
    """When each token came, rounded to microseconds."""
    loop = asyncio.get_running_loop()
    times: dict[str, list[float]] = {request_id: [] for request_id in request_ids}
    unfinished = set(request_ids)
    while unfinished:
        for output in await engine.next_step():
            times[output.request_id].append(round(loop.time(), 6))
            if output.finish is not None:
                unfinished.discard(output.request_id)
    return times


def test_pace_first_token_then_one_per_step_without_drift() -> None:
    async def main() -> None:
        engine = PacedEngine(PacedConfig(ttft_s=0.5, time_per_token_s=0.03))
        await engine.submit(request(max_tokens=200))
        times = await emission_times(engine, "a")
        assert times["a"] == [round(0.5 + 0.03 * position, 6) for position in range(200)]

    run_simulated(main())


def test_pace_later_request_joins_the_shared_steps() -> None:
    async def main() -> None:
        engine = PacedEngine(PacedConfig(ttft_s=0.5, time_per_token_s=0.1))
        await engine.submit(request("a", max_tokens=10))
        await asyncio.sleep(0.25)
        await engine.submit(request("b", max_tokens=2))
        times = await emission_times(engine, "a", "b")
        assert times["b"] == [0.8, 0.9]
        assert set(times["b"]) <= set(times["a"])

    run_simulated(main())


def test_pace_request_without_a_slot_starts_when_one_is_free() -> None:
    async def main() -> None:
        engine = PacedEngine(PacedConfig(ttft_s=0.5, time_per_token_s=0.1, max_num_seqs=1))
        await engine.submit(request("a", max_tokens=2))
        await engine.submit(request("b", max_tokens=1))
        assert await emission_times(engine, "a", "b") == {"a": [0.5, 0.6], "b": [1.1]}

    run_simulated(main())


def test_stall_moves_the_timetable_and_loses_nothing() -> None:
    async def main() -> None:
        engine = PacedEngine(PacedConfig(time_per_token_s=0.1))
        await engine.submit(request(max_tokens=4))
        engine.stall_for(2.0)
        with pytest.raises(EngineDiedError, match=r"not turned for 1\.0 s"):
            await engine.check(1.0)
        await engine.check(1.5)
        assert await emission_times(engine, "a") == {"a": [2.0, 2.1, 2.2, 2.3]}

    run_simulated(main())


def test_hang_fails_the_check_until_it_ends() -> None:
    async def main() -> None:
        engine = PacedEngine(PacedConfig())
        await engine.submit(request())
        engine.hang()
        step = asyncio.create_task(engine.next_step())
        with pytest.raises(EngineDiedError):
            await engine.check(5.0)
        assert not step.done()
        engine.unhang()
        await engine.check(0.1)
        assert len(await step) == 1

    run_simulated(main())
