"""How long the steps of a paced engine take, and what is in them, in simulated time."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from serving.domain.tokens.paced import paced_tokens
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from serving.link.messages import TokenRequest

from .simulated_time import run_simulated

BASE_S = 0.1
# A prompt token takes a millisecond.
LAW = PacedConfig(time_per_token_s=BASE_S, prefill_tokens_per_s=1000.0)


def request(
    request_id: str, num_prompt: int, max_tokens: int = 1, emitted: list[int] | None = None
) -> TokenRequest:
    return TokenRequest(request_id, [1] * num_prompt, emitted or [], max_tokens)


async def emissions(engine: PacedEngine, *request_ids: str) -> dict[str, list[float]]:
    """When each token of these came, until all have finished."""
    times: dict[str, list[float]] = {request_id: [] for request_id in request_ids}
    unfinished = set(request_ids)
    while unfinished:
        for output in await engine.next_step():
            times[output.request_id].append(round(asyncio.get_running_loop().time(), 6))
            if output.finish is not None:
                unfinished.discard(output.request_id)
    return times


def times_of(
    config: PacedConfig, *requests: TokenRequest, later: tuple[float, TokenRequest] | None = None
) -> dict[str, list[float]]:
    """When each token came of requests at 0 s, and of one that comes later."""
    found: dict[str, list[float]] = {}

    async def main() -> None:
        engine = PacedEngine(config)
        for each in requests:
            await engine.submit(each)
        names = [each.request_id for each in requests]
        if later is not None:
            at_s, last = later
            names.append(last.request_id)
            asyncio.get_running_loop().call_later(
                at_s, lambda: tasks.append(asyncio.ensure_future(engine.submit(last)))
            )
        found.update(await emissions(engine, *names))

    tasks: list[asyncio.Future[None]] = []
    run_simulated(main())
    return found


def test_prompt_takes_its_time_in_a_step_of_its_own() -> None:
    assert times_of(LAW, request("a", 50, 3)) == {"a": [0.15, 0.25, 0.35]}


def test_time_to_first_token_goes_before_the_prompt() -> None:
    config = PacedConfig(ttft_s=0.5, time_per_token_s=BASE_S, prefill_tokens_per_s=1000.0)
    assert times_of(config, request("a", 50, 2)) == {"a": [0.65, 0.75]}


def test_prompts_of_one_step_are_computed_together() -> None:
    assert times_of(LAW, request("a", 50, 2), request("b", 30)) == {"a": [0.18, 0.28], "b": [0.18]}


def test_prompt_that_comes_during_a_step_lengthens_the_next_one_for_all() -> None:
    times = times_of(LAW, request("a", 50, 4), later=(0.2, request("b", 40, 2)))
    assert times == {"a": [0.15, 0.25, 0.39, 0.49], "b": [0.39, 0.49]}


def test_idle_engine_begins_a_prompt_when_it_comes() -> None:
    times = times_of(LAW, request("a", 50), later=(0.17, request("b", 40)))
    assert times == {"a": [0.15], "b": [0.31]}


def test_long_prompt_is_computed_in_chunks_that_leave_room_for_running_requests() -> None:
    config = PacedConfig(
        time_per_token_s=BASE_S,
        prefill_tokens_per_s=1000.0,
        max_num_seqs=4,
        max_num_batched_tokens=11,
    )
    times = times_of(config, request("a", 1, 6), later=(0.05, request("b", 25)))
    # 10 of 25 tokens beside each of `a`'s, then the last 5.
    assert times["a"] == [0.101, 0.211, 0.321, 0.426, 0.526, 0.626]
    assert times["b"] == [0.426]


def test_part_of_a_prompt_in_a_step_is_bounded_while_there_are_others() -> None:
    config = PacedConfig(
        time_per_token_s=BASE_S,
        prefill_tokens_per_s=1000.0,
        max_num_seqs=3,
        max_num_batched_tokens=10,
        long_prefill_token_threshold=4,
    )
    # Steps: 4 of `a` and all of `b`; then, with nobody else, all that is left of `a`.
    assert times_of(config, request("a", 9), request("b", 3)) == {"a": [0.212], "b": [0.107]}
    # A share of three is less than four, of two it is five.
    adaptive = replace(config, long_prefill_token_threshold_adaptive=True)
    assert times_of(adaptive, request("a", 9), request("b", 3)) == {"a": [0.212], "b": [0.108]}
    three = request("a", 9), request("b", 3), request("c", 3)
    assert times_of(adaptive, *three) == {"a": [0.215], "b": [0.11], "c": [0.11]}


def test_tokens_of_a_step_are_not_bounded_where_prompts_take_no_time() -> None:
    config = PacedConfig(time_per_token_s=BASE_S, max_num_batched_tokens=1)
    times = times_of(config, request("a", 10, 3), request("b", 20, 3))
    assert times == {"a": [0.0, 0.1, 0.2], "b": [0.0, 0.1, 0.2]}


def test_prompts_are_computed_in_order_of_arrival() -> None:
    config = PacedConfig(
        time_per_token_s=BASE_S,
        prefill_tokens_per_s=1000.0,
        max_num_seqs=3,
        max_num_batched_tokens=10,
    )
    times = times_of(config, request("a", 15), request("b", 2), request("c", 9))
    # Steps: 10 of `a`; 5 of `a`, all of `b`, 3 of `c`; 6 of `c`.
    assert times == {"a": [0.22], "b": [0.22], "c": [0.326]}


def test_resumed_request_computes_what_it_had_emitted() -> None:
    emitted = paced_tokens([1] * 10, 40, LAW.token_range)
    assert times_of(LAW, request("a", 10, 42, emitted)) == {"a": [0.15, 0.25]}


def test_each_token_of_a_step_adds_to_it() -> None:
    config = PacedConfig(time_per_token_s=BASE_S, tpot_per_seq_s=0.01, prefill_tokens_per_s=1000.0)
    times = times_of(config, request("a", 10, 3), request("b", 20, 2))
    assert times == {"a": [0.15, 0.27, 0.38], "b": [0.15, 0.27]}


def test_each_running_request_adds_to_a_step_where_prompts_take_no_time() -> None:
    config = PacedConfig(ttft_s=0.5, time_per_token_s=BASE_S, tpot_per_seq_s=0.01)
    times = times_of(config, request("a", 10, 3), request("b", 20, 3))
    assert times == {"a": [0.5, 0.62, 0.74], "b": [0.5, 0.62, 0.74]}


def test_abort_of_the_prompt_in_work_lets_the_next_one_begin() -> None:
    async def main() -> None:
        config = PacedConfig(
            time_per_token_s=BASE_S,
            prefill_tokens_per_s=1000.0,
            max_num_seqs=10,
            max_num_batched_tokens=10,
        )
        engine = PacedEngine(config)
        await engine.submit(request("a", 30))
        await engine.submit(request("b", 5))
        step = asyncio.create_task(engine.next_step())
        await asyncio.sleep(0.05)
        await engine.abort(["a"])
        assert await step == []  # its line is shorter
        assert [output.request_id for output in await engine.next_step()] == ["b"]
        # What was begun is ended first: 0.11 s, then a step of its own.
        assert asyncio.get_running_loop().time() == pytest.approx(0.11 + 0.105)
        assert (engine.load.num_running, engine.load.num_waiting) == (0, 0)

    run_simulated(main())


def test_prompt_does_not_hurry_after_a_stall() -> None:
    async def main() -> None:
        engine = PacedEngine(LAW)
        await engine.submit(request("a", 50, 2))
        engine.stall_for(2.0)
        assert await emissions(engine, "a") == {"a": [2.15, 2.25]}

    run_simulated(main())


def closed_form_s(config: PacedConfig, rate: float, num_in: int, num_out: int) -> float:
    prefill_tokens_per_s = config.prefill_tokens_per_s or float("inf")
    share = rate * (num_out * config.tpot_per_seq_s + num_in / prefill_tokens_per_s)
    return config.time_per_token_s / (1 - share)


def mean_step_s(config: PacedConfig, rate: float, num_in: int, num_out: int) -> float:
    """Measured over 200 s after a warm-up, with requests at equal distances."""
    steps: list[float] = []

    async def submit_all(engine: PacedEngine) -> None:
        for number in range(int(300 * rate)):
            await engine.submit(request(str(number), num_in, num_out))
            await asyncio.sleep(1 / rate)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = PacedEngine(config)
        arrivals = asyncio.create_task(submit_all(engine))
        while loop.time() < 280:
            await engine.next_step()
            steps.append(loop.time())
        arrivals.cancel()

    run_simulated(main())
    window = [at_s for at_s in steps if 80 <= at_s <= 280]
    return (window[-1] - window[0]) / (len(window) - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "num_in", "num_out"),
    [(1.0, 100, 100), (4.0, 100, 50), (4.0, 1000, 50), (7.0, 500, 40)],
)
def test_step_time_in_a_steady_state_is_the_closed_form(
    rate: float, num_in: int, num_out: int
) -> None:
    config = PacedConfig(
        time_per_token_s=0.02,
        tpot_per_seq_s=0.0005,
        prefill_tokens_per_s=10_000.0,
        max_model_len=100_000,
    )
    expected_s = closed_form_s(config, rate, num_in, num_out)
    assert mean_step_s(config, rate, num_in, num_out) == pytest.approx(expected_s, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prefill_tokens_per_s": 0.0}, "prefill_tokens_per_s=0.0 must be > 0"),
        ({"tpot_per_seq_s": -0.1}, "tpot_per_seq_s=-0.1 must be >= 0"),
        (
            {"prefill_tokens_per_s": 1.0, "max_num_seqs": 9, "max_num_batched_tokens": 8},
            "max_num_batched_tokens=8 must be >= max_num_seqs=9",
        ),
        (
            {"prefill_tokens_per_s": 1.0, "long_prefill_token_threshold": 4097},
            "long_prefill_token_threshold=4097 is not within 0..max_model_len=4096",
        ),
    ],
)
def test_law_out_of_range_is_refused(settings: dict[str, float], words: str) -> None:
    make: Callable[..., PacedConfig] = PacedConfig
    with pytest.raises(ValueError, match=words):
        make(**settings)
