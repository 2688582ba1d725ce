"""Sends one planned request, checks its answer and leaves its record."""

from collections.abc import Callable
from dataclasses import dataclass

import gevent

from loadtest.client.body import BodyMaker, Conversation
from loadtest.client.expected_output import AnswerCheck, CheckAnswer
from loadtest.client.http_client import Client, Exchange, OutgoingRequest
from loadtest.errors import ErrorKind
from loadtest.planned_request import PlannedRequest
from loadtest.records import RequestRecord


@dataclass(frozen=True, slots=True)
class RunClock:
    """The worker whose records these are, and the start of the run in monotonic seconds."""

    worker: int
    start_s: float


@dataclass(slots=True)
class Sender:
    """Sends for one worker. `write` takes each record as it is made."""

    client: Client
    bodies: BodyMaker
    checker: CheckAnswer | None
    clock: RunClock
    write: Callable[[RequestRecord], None]
    num_sent: int = 0

    def prepare(
        self, planned_request: PlannedRequest, so_far: Conversation | None
    ) -> OutgoingRequest:
        """Makes the request ready, ahead of its instant."""
        return self.bodies.make(planned_request, so_far)

    def send(
        self,
        planned_request: PlannedRequest,
        request: OutgoingRequest,
        due_s: float,
        so_far: Conversation | None,
    ) -> float | None:
        """Sends it, records it and adds its answer to the conversation.

        Returns when its answer was over, `None` if there was no whole one. A greenlet that is
        killed meanwhile leaves its record before it ends.
        """
        self.num_sent += 1
        # Answers are added to the conversation below, so this is the length of this prompt.
        num_input = planned_request.input_tokens if so_far is None else so_far.num_tokens
        exchange = self.client.send(request)
        check = self._checked(planned_request, request, exchange)
        self.write(self._record(planned_request, exchange, due_s, num_input, check))
        if exchange.error == ErrorKind.UNFINISHED:
            # Raised again after the record; else the killed greenlet would send the next turn.
            raise gevent.GreenletExit
        if exchange.error is not None:
            return None
        if so_far is not None:
            self.bodies.add_answer(planned_request, so_far, exchange)
        return exchange.ended_s

    def _checked(
        self, planned_request: PlannedRequest, request: OutgoingRequest, exchange: Exchange
    ) -> AnswerCheck | None:
        """Checks a whole answer against the known one; a failed one is counted as that already."""
        if self.checker is None or exchange.error is not None:
            return None
        # Our own tokens where we know them: a server that mixed prompts up would report others.
        prompt = request.prompt_token_ids or exchange.answer.prompt_token_ids
        if prompt is None or not exchange.answer.token_ids:
            return None
        return self.checker(prompt, exchange.answer.token_ids, planned_request)

    def _record(
        self,
        planned_request: PlannedRequest,
        exchange: Exchange,
        due_s: float,
        num_input: int,
        check: AnswerCheck | None,
    ) -> RequestRecord:
        answer, usage, start_s = exchange.answer, exchange.answer.usage, self.clock.start_s
        return RequestRecord(
            request_id=planned_request.request_id,
            worker=self.clock.worker,
            model=planned_request.model,
            api=planned_request.api,
            scheduled_s=due_s - start_s,
            sent_s=exchange.sent_s - start_s,
            first_s=_since(answer.first_s, start_s),
            last_s=_since(answer.last_s, start_s),
            ended_s=exchange.ended_s - start_s,
            planned_input_tokens=num_input,
            planned_output_tokens=planned_request.output_tokens,
            error=exchange.error,
            detail=exchange.detail,
            http_status=exchange.http_status,
            attempts=exchange.attempts,
            input_tokens=None if usage is None else usage.prompt_tokens,
            output_tokens=None if usage is None else usage.completion_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            num_chunks=answer.num_chunks,
            gap_counts=answer.gap_counts,
            longest_gap_s=answer.longest_gap_s,
            longest_gap_at_s=_since(answer.longest_gap_at_s, start_s),
            finish_reason=answer.finish_reason,
            session_id=planned_request.session_id,
            turn=planned_request.turn,
            tenant=planned_request.tenant,
            priority=planned_request.priority,
            lost_tokens=None if check is None else check.lost,
            repeated_tokens=None if check is None else check.repeated,
            foreign_tokens=None if check is None else check.foreign,
        )


def _since(at_s: float | None, start_s: float) -> float | None:
    return None if at_s is None else at_s - start_s
