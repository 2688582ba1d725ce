"""Every field of every route with every value of our table, and pairs, at two real vLLM engines.

None may cost an engine, break an answer off, or be answered as if the fault were ours.
"""

import asyncio
import itertools
import sys
from collections.abc import Iterator, Sequence

import pytest

from tests.e2e.application import Role, RunningApplication, application_args, demo_model, engine_ids
from tests.e2e.logs import logs_with
from tests.e2e.memory import MIB, own_bytes, serving_processes

from .cases import PRIVATE, Case, every_case, paired_cases
from .outcomes import Outcome, longest_turn_s, outcomes_of, told

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.starts_engine]

NUM_PAIRS, SEED = 25_000, 21
# Between two of them everything is idle, and the memory is looked at.
NUM_PARTS, ALLOWED_MIB = 4, 16.0


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    with RunningApplication(application_args(demo_model())) as running:
        yield running


class Sent:
    """What came of the cases sent so far, and what they cost the application."""

    def __init__(self, application: RunningApplication) -> None:
        self.outcomes: list[Outcome] = []
        self.longest_turn_s = self.longest_turn_cpu_s = 0.0
        self._application = application
        self._processes = serving_processes(application)
        self._sizes = [own_bytes(self._processes)]

    async def send(self, cases: Sequence[Case]) -> None:
        is_over = asyncio.Event()
        watch = asyncio.create_task(longest_turn_s(self._application.base_url, is_over))
        self.outcomes += await outcomes_of(self._application.base_url, cases)
        is_over.set()
        turn_s, cpu_s = await watch
        self.longest_turn_s = max(self.longest_turn_s, turn_s)
        self.longest_turn_cpu_s = max(self.longest_turn_cpu_s, cpu_s)
        self._application.wait_idle(30.0)
        self._sizes.append(own_bytes(self._processes))

    def growth_mib(self) -> list[dict[int, float]]:
        """By process, in each part."""
        return [
            {pid: (after[pid] - before[pid]) / MIB for pid in before}
            for before, after in itertools.pairwise(self._sizes)
        ]

    def told(self) -> str:
        lines = [
            f"longest turn of the gateway's loop: {self.longest_turn_s * 1000:.0f} ms, "
            f"most CPU time of one {self.longest_turn_cpu_s * 1000:.0f} ms"
        ]
        for process in self._processes:
            parts = ", ".join(f"{part[process.pid]:+.1f}" for part in self.growth_mib())
            size_mib = self._sizes[-1][process.pid] / MIB
            lines.append(f"{process.name()}: {size_mib:.0f} MiB, by parts {parts}")
        return "".join(f"    {line}\n" for line in lines)


@pytest.mark.parametrize("kind", ["single values", "pairs"])
def test_no_value_of_any_field_costs_an_engine_or_is_our_fault(
    application: RunningApplication, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    engines = engine_ids(application.fleet())
    processes = {each.pid for each in application.processes(Role.ENGINE_HOST)}
    assert len(engines) == len(processes) == 2
    cases = every_case() if kind == "single values" else paired_cases(NUM_PAIRS, SEED)
    sent = Sent(application)
    for part in range(NUM_PARTS):
        asyncio.run(sent.send(cases[part::NUM_PARTS]))
    outcomes = sent.outcomes
    with capsys.disabled():
        sys.stdout.write(told(outcomes) + sent.told())
    assert [each for each in outcomes if each.is_our_fault][:10] == []
    assert engine_ids(application.fleet()) == engines
    assert {each.pid for each in application.processes(Role.ENGINE_HOST)} == processes
    # Of both, two of five have to come to an engine: what is refused at once tries little.
    assert sum(each.is_an_engines for each in outcomes) > 0.1 * len(outcomes)
    # Tables, pools and caches fill with the first of them.
    assert {pid: mib for pid, mib in sent.growth_mib()[-1].items() if mib > ALLOWED_MIB} == {}
    application.wait_idle()
    assert logs_with(application, [PRIVATE]) == {}
