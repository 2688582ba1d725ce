"""What a request is on the wire, and whom the death of an engine is blamed on."""

import pytest

from serving.gateway.flights import CLEARING_TOKENS, SILENT_LOSSES, TRIAL_LOSSES, Flight, count_loss
from serving.gateway.telemetry.request_metrics import RequestMeter


def flight(request_id: str = "r", *, num_losses: int = 0, emitted: int = 0) -> Flight:
    return Flight(
        request_id=request_id,
        prompt_token_ids=[1, 2],
        max_tokens=50,
        payload=[b"whole"],
        arrived_at_s=0.0,
        stopwatch=RequestMeter().taken(1, 0.0),
        emitted=list(range(emitted)),
        num_losses=num_losses,
    )


def test_first_attempt_travels_under_the_request_id() -> None:
    message = flight("abc").to_message()
    assert (message.request_id, message.emitted_token_ids) == ("abc", [])
    assert (message.prompt_token_ids, message.max_tokens) == ([1, 2], 50)
    assert message.payload == [b"whole"]


def test_every_attempt_travels_under_an_id_of_its_own() -> None:
    subject = flight("abc")
    ids = []
    for attempt in range(4):
        subject.attempt = attempt
        ids.append(subject.to_message().request_id)
    assert len(set(ids)) == 4


def test_message_keeps_what_was_emitted_when_it_was_made() -> None:
    subject = flight(emitted=2)
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
    subject = flight(emitted=emitted)
    subject.resume_payload = resume_payload
    assert subject.to_message().payload == sent


@pytest.mark.parametrize(
    ("before", "since", "is_cleared"),
    [
        (0, CLEARING_TOKENS - 1, False),
        (0, CLEARING_TOKENS, True),
        (100, CLEARING_TOKENS - 1, False),
        (100, CLEARING_TOKENS, True),
    ],
)
def test_request_clears_itself_by_the_tokens_of_this_attempt_alone(
    before: int, since: int, is_cleared: bool
) -> None:
    subject = flight(emitted=before + since)
    subject.num_emitted_at_dispatch = before
    assert subject.has_cleared_itself is is_cleared


def test_loss_counts_against_everything_on_the_engine() -> None:
    flights = [flight(num_losses=0), flight(num_losses=1)]
    count_loss(flights, is_told=True)
    assert [each.num_losses for each in flights] == [1, 2]


def test_hosts_that_fall_silent_count_as_one_engine_each_few() -> None:
    subject = flight()
    losses = []
    for _ in range(2 * SILENT_LOSSES):
        count_loss([subject], is_told=False)
        losses.append(subject.num_losses)
    quiet = SILENT_LOSSES - 1
    assert losses == [*[0] * quiet, 1, *[1] * quiet, 2]


def test_silent_losses_are_forgotten_by_a_request_that_cleared_itself() -> None:
    cleared = flight(num_losses=1, emitted=CLEARING_TOKENS)
    cleared.num_silent_losses = SILENT_LOSSES - 1
    count_loss([cleared], is_told=False)
    assert (cleared.num_losses, cleared.num_silent_losses) == (0, 1)


def test_loss_counts_from_one_again_for_a_request_that_cleared_itself() -> None:
    cleared = flight(num_losses=1, emitted=CLEARING_TOKENS)
    count_loss([cleared], is_told=True)
    assert cleared.num_losses == 1


def test_request_on_trial_takes_the_blame_alone() -> None:
    suspect, bystander = flight(num_losses=TRIAL_LOSSES), flight()
    suspect.is_on_trial = True
    count_loss([bystander, suspect], is_told=True)
    assert (suspect.num_losses, bystander.num_losses) == (TRIAL_LOSSES + 1, 0)


@pytest.mark.parametrize(("num_losses", "needs_trial"), [(0, False), (1, False), (2, True)])
def test_request_needs_a_trial_from_its_second_loss_on(num_losses: int, needs_trial: bool) -> None:
    assert flight(num_losses=num_losses).needs_trial is needs_trial
