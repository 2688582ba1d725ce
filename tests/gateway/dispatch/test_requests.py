"""What a request is on the wire, and whom the death of an engine is blamed on."""

import pytest

from serving.gateway.dispatch.requests import (
    ISOLATION_LOSSES,
    PROVING_TOKENS,
    SILENT_LOSSES,
    InFlightRequest,
    count_loss,
)
from serving.gateway.telemetry.request_telemetry import ModelTelemetry
from serving.link.messages import EngineEnd


def running(request_id: str = "r", *, num_losses: int = 0, emitted: int = 0) -> InFlightRequest:
    return InFlightRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2],
        max_tokens=50,
        payload=[b"whole"],
        telemetry=ModelTelemetry("demo", 0.0).arrived(request_id, 2, 0.0),
        emitted=list(range(emitted)),
        num_losses=num_losses,
    )


def test_first_attempt_travels_under_the_request_id() -> None:
    message = running("abc").to_message()
    assert (message.request_id, message.emitted_token_ids) == ("abc", [])
    assert (message.prompt_token_ids, message.max_tokens) == ([1, 2], 50)
    assert message.payload == [b"whole"]


def test_every_attempt_travels_under_an_id_of_its_own() -> None:
    subject = running("abc")
    ids = []
    for attempt in range(4):
        subject.attempt = attempt
        ids.append(subject.to_message().request_id)
    assert len(set(ids)) == 4


def test_message_keeps_what_was_emitted_when_it_was_made() -> None:
    subject = running(emitted=2)
    message = subject.to_message()
    subject.emitted.append(99)
    assert message.emitted_token_ids == [0, 1]


@pytest.mark.parametrize(
    ("emitted", "resume_payload", "sent"),
    [
        (0, None, [b"whole"]),
        (3, None, [b"whole"]),
        (0, [b"rest"], [b"whole"]),
        (3, [b"rest"], [b"rest"]),
    ],
)
def test_resume_payload_is_sent_once_something_was_emitted(
    emitted: int, resume_payload: list[bytes] | None, sent: list[bytes]
) -> None:
    subject = running(emitted=emitted)
    subject.resume_payload = resume_payload
    assert subject.to_message().payload == sent


@pytest.mark.parametrize(
    ("before", "since", "is_proven"),
    [
        (0, PROVING_TOKENS - 1, False),
        (0, PROVING_TOKENS, True),
        (100, PROVING_TOKENS - 1, False),
        (100, PROVING_TOKENS, True),
    ],
)
def test_request_is_proven_by_the_tokens_of_this_attempt_alone(
    before: int, since: int, is_proven: bool
) -> None:
    subject = running(emitted=before + since)
    subject.num_emitted_at_dispatch = before
    assert subject.is_proven is is_proven


def test_loss_counts_against_everything_on_the_engine() -> None:
    requests = [running(num_losses=0), running(num_losses=1)]
    count_loss(requests, EngineEnd.CRASHED)
    assert [request.num_losses for request in requests] == [1, 2]


def test_hosts_that_fall_silent_count_as_one_engine_each_few() -> None:
    subject = running()
    losses = []
    for _ in range(2 * SILENT_LOSSES):
        count_loss([subject], None)
        losses.append(subject.num_losses)
    quiet = SILENT_LOSSES - 1
    assert losses == [*[0] * quiet, 1, *[1] * quiet, 2]


def test_hang_counts_as_a_host_that_fell_silent_and_not_as_a_crash() -> None:
    subject = running()
    for end in (EngineEnd.HUNG, None):
        count_loss([subject], end)
    assert (subject.num_losses, subject.num_silent_losses) == (0, SILENT_LOSSES - 1)
    count_loss([subject], EngineEnd.HUNG)
    assert subject.num_losses == 1


def test_engine_that_was_told_to_end_counts_against_nobody_not_even_a_suspect() -> None:
    suspect, bystander = running(num_losses=ISOLATION_LOSSES), running()
    suspect.is_isolated = True
    for _ in range(2 * SILENT_LOSSES):
        count_loss([bystander, suspect], EngineEnd.TOLD)
    assert (suspect.num_losses, suspect.num_silent_losses) == (ISOLATION_LOSSES, 0)
    assert (bystander.num_losses, bystander.num_silent_losses) == (0, 0)


def test_isolated_request_under_a_hang_is_not_blamed_as_for_a_crash() -> None:
    suspect = running(num_losses=ISOLATION_LOSSES)
    suspect.is_isolated = True
    count_loss([suspect], EngineEnd.HUNG)
    assert suspect.num_losses == ISOLATION_LOSSES


def test_silent_losses_are_forgotten_by_a_proven_request() -> None:
    proven = running(num_losses=1, emitted=PROVING_TOKENS)
    proven.num_silent_losses = SILENT_LOSSES - 1
    count_loss([proven], None)
    assert (proven.num_losses, proven.num_silent_losses) == (0, 1)


def test_loss_counts_from_one_again_for_a_proven_request() -> None:
    proven = running(num_losses=1, emitted=PROVING_TOKENS)
    count_loss([proven], EngineEnd.CRASHED)
    assert proven.num_losses == 1


def test_isolated_request_takes_the_blame_alone() -> None:
    suspect, bystander = running(num_losses=ISOLATION_LOSSES), running()
    suspect.is_isolated = True
    count_loss([bystander, suspect], EngineEnd.CRASHED)
    assert (suspect.num_losses, bystander.num_losses) == (ISOLATION_LOSSES + 1, 0)


@pytest.mark.parametrize(("num_losses", "needs_isolation"), [(0, False), (1, False), (2, True)])
def test_request_needs_isolation_from_its_second_loss_on(
    num_losses: int, needs_isolation: bool
) -> None:
    assert running(num_losses=num_losses).needs_isolation is needs_isolation
