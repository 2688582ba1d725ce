"""What is not an engine gets a signal under 16 streams; `test_kills` does that to engines.

A gateway and the ingress hold the connections of clients: what is lost with them is what
`docs/reference/reliability.md` says, and nothing else.
"""

import asyncio
import signal
import sys
from collections.abc import Iterator

import psutil
import pytest

from .application import (
    Role,
    RunningApplication,
    application_args,
    demo_model,
    linked_engines,
    wait_until,
)
from .mixed_streams import MODEL, WORKLOAD, Disturbance
from .streams import Answer, stream_all

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.starts_engine]

SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)
WHOLE_AGAIN_S = 180.0
# How many of the streams may be lost with one. Gateways have half of them each; one more where a
# connection was counted late.
CARRIED = {
    Role.DIRECTORY: 0,
    Role.CONTROLLER: 0,
    Role.GATEWAY: len(WORKLOAD) // 2 + 1,
    Role.HAPROXY: len(WORKLOAD),
}


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    """Two gateways over two vLLM engines."""
    args = application_args(demo_model(), gateway={"replicas": 2, "num_cpus": 0.01})
    with RunningApplication(args) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(application: RunningApplication) -> list[Answer]:
    answers = asyncio.run(stream_all(application.base_url, WORKLOAD))
    assert [answer.error for answer in answers] == [None] * len(WORKLOAD)
    return answers


@pytest.fixture(autouse=True)
def whole_fleet(application: RunningApplication) -> None:
    """Every signal finds two gateways that answer and two engines."""
    application.loads(2, WHOLE_AGAIN_S)
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, WHOLE_AGAIN_S)
    application.wait_idle()


def disturb(
    application: RunningApplication, victim: psutil.Process, number: signal.Signals
) -> list[Answer]:
    """Answers of which one gets the signal sent when it has begun, and the others are under way."""
    disturbance = Disturbance(victim.pid, number, stream=0, position=1)
    try:
        answers = asyncio.run(stream_all(application.base_url, WORKLOAD, disturbance))
        assert disturbance.at_s is not None
        return answers
    finally:
        if number == signal.SIGSTOP and victim.is_running():
            # Serve has another by now or soon, and ends this one when its drain is over.
            victim.kill()
            victim.wait(WHOLE_AGAIN_S)


def report(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n    {line}\n")


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("role", CARRIED, ids=lambda role: role.name)
def test_no_stream_differs_but_those_that_the_process_carried(
    application: RunningApplication,
    undisturbed: list[Answer],
    capsys: pytest.CaptureFixture[str],
    role: Role,
    number: signal.Signals,
) -> None:
    # The one before may have ended a moment ago.
    wait_until(lambda: bool(application.processes(role)), WHOLE_AGAIN_S)
    victim = application.processes(role)[0]
    answers = disturb(application, victim, number)
    lost = [at for at, answer in enumerate(answers) if answer.error is not None]
    others = [at for at in range(len(WORKLOAD)) if at not in lost]
    errors = sorted({str(answers[at].error) for at in lost})
    report(
        capsys,
        f"{role.name} {number.name}: {len(lost)} of {len(WORKLOAD)} lost {errors}, "
        f"it is there: {victim.is_running()}",
    )
    assert [at for at in others if not answers[at].same_as(undisturbed[at])] == []
    if role == Role.GATEWAY and number in (signal.SIGTERM, signal.SIGINT):
        assert lost == []
    assert len(lost) <= CARRIED[role]
    # The connection ends, or nothing comes: nobody is told that an answer is whole.
    assert not any(answers[at].is_done for at in lost)
