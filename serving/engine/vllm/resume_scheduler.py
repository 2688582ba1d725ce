"""Lets a request continue where another engine left it, and tells what stands in line.

Both in vLLM's schedulers.

A resumed request is, to vLLM, a preempted one: prompt known, some output known, nothing computed.
vLLM already recomputes such a request exactly. Three things are missing and added here. The output
emitted elsewhere is put back before the request is queued, so that token budgets, stop rules,
repetition checks and block hashes work as if it had never moved. Its place in the queue is before
those that have not begun. Its grammar is advanced over the same tokens once it is compiled.
The worker's part is in `resume_worker`.
"""

import itertools
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request, RequestStatus

from serving.domain.tokens.cached_blocks import CacheLayout
from serving.engine.vllm.spied_map import CacheSpy
from serving.link.vllm_codec import emitted_token_ids

logger = init_logger(__name__)


# Names what is told among the numbers of vLLM's KV connectors, which travel with each step: as a
# list, the tokens left of prompts that have begun, those of all that have not, and the id of the
# request that came last.
LINE_STATS = "slicewise_line"
# Beside it, and only where something has changed: the keys of blocks that have come into the prefix
# cache, and of those that have gone (`cached_blocks`).
CACHE_STATS = "slicewise_cache"

# More than these do not stand in line where gateways heed what an engine has room for.
_MAX_COUNTED = 1024


class _Resuming(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._latest_id = ""
        self._spy: CacheSpy | None = None
        if self.cache_config.enable_prefix_caching and _has_one_group(self):
            layout = CacheLayout.of_blocks(self.hash_block_size, b"")
            self._spy = CacheSpy(self.kv_cache_manager.block_pool, layout.unit_tokens)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            told: dict[str, Any] = {LINE_STATS: [*self._tokens_in_line(), self._latest_id]}
            if self._spy is not None and any(changes := self._spy.take_changes()):
                told[CACHE_STATS] = changes
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), **told}
        return stats

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        was_reset = bool(super().reset_prefix_cache(*args, **kwargs))
        if self._spy is not None:
            self._spy.was_reset()
        return was_reset

    def _tokens_in_line(self) -> tuple[int, int]:
        """Returns the tokens left of prompts that have begun, and of those that have not.

        One that decodes has one token left, or none while its next step is under way.
        """
        begun = sum(
            left
            for request in self.running
            if (left := request.num_tokens - request.num_computed_tokens) > 1
        )
        waiting = itertools.islice(self.waiting, _MAX_COUNTED)
        return begun, sum(request.num_tokens for request in waiting)

    def add_request(self, request: Request) -> None:
        self._latest_id = request.request_id
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


def _has_one_group(scheduler: Scheduler) -> bool:
    """Returns whether all layers cache alike; else a block in one group's cache says little."""
    return len(scheduler.kv_cache_config.kv_cache_groups) == 1


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
