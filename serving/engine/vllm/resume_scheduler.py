"""Lets a request continue where another engine left it, in vLLM's schedulers.

A resumed request is, to vLLM, a preempted one: prompt known, some output known, nothing computed.
vLLM already recomputes such a request exactly. Three things are missing and added here. The output
emitted elsewhere is put back before the request is queued, so that token budgets, stop rules,
repetition checks and block hashes work as if it had never moved. Its place in the queue is before
those that have not begun. Its grammar is advanced over the same tokens once it is compiled.
The worker's part is in `resume_worker`.
"""

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from serving.link.vllm_codec import emitted_token_ids

logger = init_logger(__name__)


class _Resuming(Scheduler):
    def add_request(self, request: Request) -> None:
        emitted = emitted_token_ids(request.sampling_params)
        if emitted and request.request_id not in self.requests:
            request.append_output_token_ids(emitted)
            # Prefill statistics were reported when the request first ran; vLLM computes them on the
            # assumption that no output can be in the prefix cache yet.
            request.prefill_stats = None
        super().add_request(request)

    def _enqueue_waiting_request(self, request: Request) -> None:
        super()._enqueue_waiting_request(request)
        queue = self.waiting
        # By priority, vLLM's other order, it stands where its first arrival puts it already.
        is_last = isinstance(queue, FCFSRequestQueue) and bool(queue) and queue[-1] is request
        if request.num_output_tokens and is_last:
            # As vLLM does with those that it preempts: the client of this one sees its stream stand
            # still. The others' clients have nothing yet.
            queue.pop()
            place = next((n for n, each in enumerate(queue) if not each.num_output_tokens), None)
            queue.insert(len(queue) if place is None else place, request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        waited_for_grammar = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        proceeds = super()._handle_blocked_waiting_request(request)
        if proceeds and waited_for_grammar and request.num_output_tokens:
            self._advance_grammar(request)
        return bool(proceeds)

    def _advance_grammar(self, request: Request) -> None:
        """Feeds the emitted tokens to the fresh grammar, by vLLM's own rule for reasoning."""
        emitted = list(request.output_token_ids)
        if not self.structured_output_manager.accept_tokens(request, emitted):
            # The first engine sampled these tokens under the same grammar, so this is a bug of ours
            # or a changed model; the output so far stands, only its tail is no longer constrained.
            logger.error(
                "resume grammar_rejected request_id=%s emitted=%d",
                request.request_id,
                len(emitted),
            )


class ResumingScheduler(_Resuming):
    """Resumes requests in engines that schedule synchronously (vLLM on CPU)."""


class ResumingAsyncScheduler(_Resuming, AsyncScheduler):
    """Resumes requests in engines that schedule ahead of the device."""


def resuming_scheduler(*, async_scheduling: bool) -> type[Scheduler]:
    """Returns the class of scheduler that resumes requests, for either mode of scheduling."""
    return ResumingAsyncScheduler if async_scheduling else ResumingScheduler


def scheduler_path(*, async_scheduling: bool) -> str:
    """Returns the import path of that class, for vLLM's `scheduler_cls`."""
    cls = resuming_scheduler(async_scheduling=async_scheduling)
    return f"{cls.__module__}.{cls.__qualname__}"
