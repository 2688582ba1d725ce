"""Engines die under streams whose tokens are held for 100 ms, and no client can tell.

To the streams of every kind come plain ones, which are written past vLLM. What they answer
undisturbed is compared with what they answer through a kill, both with the hold.
"""

import asyncio
import signal

import pytest

from .application import Role, RunningApplication, application_args, demo_model
from .conftest import Damage
from .mixed_streams import WORKLOAD, chat, completion
from .streams import Answer, Request, stream_all
from .test_kills import Kill, Plan, Victim, report, survive, wait_whole

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine]

# After these the shared application has another gateway.
LEAVES_IT_DAMAGED = Damage.OTHER_OPTIONS

HOLD_S = 0.1
GATEWAY_START_S = 150.0
# Without the token ids that keep a stream with vLLM.
PLAIN = [
    *(
        chat(question, return_token_ids=None, min_tokens=300)
        for question in ("What is a host?", "What is a chip?")
    ),
    *(completion(f"A slice of {number} chips", return_token_ids=None) for number in (4, 8)),
    completion("A link is", return_token_ids=None, stop=["zq"]),
]
STREAMS: list[Request] = [*WORKLOAD, *PLAIN]
# Each costs the start of a new engine. `make test` has a SIGKILL without a hold: `test_kills.py`.
ALWAYS_TRIED = {Kill(Victim.CORE, signal.SIGSTOP)}
KILLS = [
    Kill(victim, number)
    for victim in (Victim.HOST, Victim.CORE, Victim.WORKER)
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
]


@pytest.fixture(scope="module")
def application(demo_application: RunningApplication) -> RunningApplication:
    """The shipped model on two engines, behind a gateway that holds whatever its load.

    The engines are those of other tests; only the gateway is another one.
    """
    hold = {"min_hold_s": HOLD_S, "max_hold_s": HOLD_S}
    was = demo_application.fleet()["gateway"]["id"]
    changed = demo_application.write_config(application_args(demo_model(), gateway=hold))
    assert demo_application.serve("deploy", str(changed)).returncode == 0
    # The one before takes nothing more once another has answered and it has ended.
    demo_application.wait_fleet(
        lambda fleet: (
            fleet["gateway"]["id"] != was and len(demo_application.processes(Role.GATEWAY)) == 1
        ),
        GATEWAY_START_S,
    )
    wait_whole(demo_application)
    return demo_application


@pytest.fixture(scope="module")
def undisturbed(application: RunningApplication) -> list[Answer]:
    """What the streams answer when nothing happens."""
    answers = asyncio.run(stream_all(application.base_url, STREAMS))
    assert [answer.error for answer in answers] == [None] * len(STREAMS)
    return answers


def test_tokens_are_held_and_joined(undisturbed: list[Answer]) -> None:
    for answer in undisturbed[len(WORKLOAD) : -1]:
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] > len(answer.chunk_times_s)


@pytest.mark.parametrize(
    "kill",
    [pytest.param(kill, marks=() if kill in ALWAYS_TRIED else pytest.mark.long) for kill in KILLS],
    ids=str,
)
def test_held_streams_survive_exactly_when(
    application: RunningApplication,
    undisturbed: list[Answer],
    capsys: pytest.CaptureFixture[str],
    kill: Kill,
) -> None:
    plan = Plan.from_seed(200 + KILLS.index(kill), kill)
    report(capsys, survive(application, undisturbed, plan, STREAMS))
