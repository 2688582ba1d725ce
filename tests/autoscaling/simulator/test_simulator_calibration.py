"""The simulator against the platform's own routing and paced engine, on one timetable.

What `python -m benchmarks calibration` compares on a live cluster, without the cluster: here every
instant must agree.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from autoscaling.simulator.world import kernel
from autoscaling.simulator.world.arrivals import Requests, draw_poisson, stages
from autoscaling.simulator.world.engines import Engines, GatewayLimits
from autoscaling.simulator.world.synthetic_traces import TRACE_LAWS, synthetic_hour
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.engine.paced.batch import PacedBatch, PacedSequence
from serving.engine.paced.config import PacedConfig
from serving.gateway.dispatch.known_room import Need
from tests.gateway.dispatch.plain_choice import Engine, chosen

pytestmark = pytest.mark.slow

BASE_S, PER_SEQUENCE_S, PROMPT_TOKENS_PER_S = 0.03, 0.006, 2500.0


def paced_config(ttft_s: float, max_num_seqs: int, max_num_batched_tokens: int) -> PacedConfig:
    return PacedConfig(
        ttft_s=ttft_s,
        time_per_token_s=BASE_S,
        tpot_per_seq_s=PER_SEQUENCE_S,
        prefill_tokens_per_s=PROMPT_TOKENS_PER_S,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def profile_of(config: PacedConfig) -> CapacityProfile:
    return CapacityProfile(
        model="tiny",
        engine="paced",
        base_s=config.time_per_token_s,
        per_sequence_s=config.tpot_per_seq_s,
        per_prompt_token_s=1 / PROMPT_TOKENS_PER_S,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        ttft_floor_s=config.ttft_s,
        measured_on="2026-11-21",
        source="the pace of the paced engine",
    )


class PacedFleet:
    """Paced engines behind the gateway's choice, from one event to the next."""

    def __init__(self, config: PacedConfig, num_engines: int) -> None:
        self._config = config
        self._batches = {f"engine-{number}": PacedBatch(config) for number in range(num_engines)}
        self._on = {engine_id: set[str]() for engine_id in self._batches}
        self._num_dispatched = dict.fromkeys(self._batches, 0)
        self._waiting: deque[PacedSequence] = deque()

    def due_at_s(self) -> float:
        dues = (batch.due_at_s for batch in self._batches.values())
        return min((due for due in dues if due is not None), default=np.inf)

    def submit(self, number: int, input_tokens: int, output_tokens: int, now_s: float) -> None:
        sequence = PacedSequence(str(number), 0, 0, output_tokens, input_tokens, is_poisoned=False)
        self._waiting.append(sequence)
        self._serve(now_s)

    def _serve(self, now_s: float) -> None:
        while self._waiting:
            need = Need(self._waiting[0].prompt_left)
            engine_id = chosen([self._known(each) for each in self._batches], need).engine_id
            if engine_id is None:
                return
            sequence = self._waiting.popleft()
            self._num_dispatched[engine_id] += 1
            self._on[engine_id].add(sequence.request_id)
            self._batches[engine_id].add(sequence, now_s)

    def _known(self, engine_id: str) -> Engine:
        count, line = len(self._on[engine_id]), self._batches[engine_id].backlog_tokens(1.0)
        has_sequence = count < self._config.max_num_seqs
        has_place = has_sequence and line < self._config.max_num_batched_tokens
        return Engine(
            engine_id,
            count,
            self._num_dispatched[engine_id],
            backlog_tokens=line,
            has_place=has_place,
            has_full_line=has_sequence and not has_place,
        )

    def step(self, now_s: float) -> Iterator[int]:
        """The requests that get a token now."""
        for engine_id, batch in self._batches.items():
            if batch.due_at_s is not None and batch.due_at_s <= now_s:
                for output in batch.step(now_s):
                    if output.finish is not None:
                        self._on[engine_id].discard(output.request_id)
                    yield int(output.request_id)
                self._serve(now_s)


def played(
    config: PacedConfig, requests: Requests, num_engines: int
) -> tuple[list[float], list[float]]:
    """First and last token of each request, after its arrival."""
    fleet = PacedFleet(config, num_engines)
    first_s, last_s = [np.nan] * len(requests), [np.nan] * len(requests)
    arrivals_s = [*requests.arrival_s.tolist(), np.inf]
    num_arrived = 0
    while (now_s := min(fleet.due_at_s(), arrivals_s[num_arrived])) < np.inf:
        if fleet.due_at_s() > now_s:
            lengths = requests.input_tokens[num_arrived], requests.output_tokens[num_arrived]
            fleet.submit(num_arrived, int(lengths[0]), int(lengths[1]), now_s)
            num_arrived += 1
            continue
        for number in fleet.step(now_s):
            last_s[number] = now_s - arrivals_s[number]
            if np.isnan(first_s[number]):
                first_s[number] = last_s[number]
    return first_s, last_s


def azure_like(rate_per_s: float, duration_s: float = 300.0) -> Requests:
    hour = synthetic_hour(TRACE_LAWS["azure-conv"], seed=1)
    short = Requests(
        hour.arrival_s,
        np.maximum(1, hour.input_tokens // 10),
        np.maximum(1, hour.output_tokens // 10),
    )
    return draw_poisson(stages((duration_s, rate_per_s)), short, seed=2)


@pytest.mark.parametrize(
    ("num_engines", "rate_per_s", "max_num_seqs", "max_num_batched_tokens"),
    [
        pytest.param(1, 1.2, 32, 8192, id="one engine, a third of its rate"),
        pytest.param(1, 3.4, 32, 8192, id="one engine at its rate"),
        pytest.param(2, 7.0, 32, 8192, id="two engines at their rate"),
        pytest.param(3, 12.0, 6, 8192, id="out of sequences"),
        pytest.param(2, 6.0, 16, 64, id="prompts in chunks"),
    ],
)
def test_every_token_comes_when_paced_engines_behind_the_routing_give_it(
    num_engines: int, rate_per_s: float, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    config = paced_config(0.0, max_num_seqs, max_num_batched_tokens)
    requests = azure_like(rate_per_s)
    first_s, last_s = played(config, requests, num_engines)
    engines = Engines(requests, profile_of(config), GatewayLimits())
    for _ in range(num_engines):
        engines.open(0.0)
    answers = engines.finish()
    assert (answers.status == kernel.SERVED).all()
    assert answers.first_s == pytest.approx(first_s, rel=1e-6, abs=1e-6)
    assert answers.last_s == pytest.approx(last_s, rel=1e-6, abs=1e-6)


def test_floor_of_the_first_token_is_added_where_the_engine_waits_it_out() -> None:
    # On the engine the floor passes before the prompt joins a step: a request may join another
    # step than the simulated one, which moves single answers but not the whole.
    config = paced_config(0.02, 32, 8192)
    requests = azure_like(2.5, duration_s=1000.0)
    first_s, last_s = played(config, requests, 2)
    engines = Engines(requests, profile_of(config), GatewayLimits())
    engines.open(0.0)
    engines.open(0.0)
    answers = engines.finish()
    for found, expected in ((answers.first_s, first_s), (answers.last_s, last_s)):
        for share in (50, 95):
            assert np.percentile(found, share) == pytest.approx(
                np.percentile(expected, share), rel=0.05
            )
