"""Gives a resumed request its emitted tokens back in tpu-inference's worker; counts compiles.

The counterpart of `vllm.resume_worker` for the batch of tpu-inference. `vllm.resume_scheduler`
sends a resumed request as a new one, prompt only; here the emitted tokens become its output before
it enters the batch. Sampling on a TPU has no generator per request, so none is wound forward.
"""

import dataclasses
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from tpu_inference import envs
from tpu_inference.runner import tpu_runner
from tpu_inference.runner.input_batch import CachedRequestState, InputBatch
from tpu_inference.worker.tpu_worker import TPUWorker

from serving.directory.ray_hosts import own_address, own_node_id
from serving.engine.load_stage import ReportsStages
from serving.engine.remote_reports import RelayAddress, report_to
from serving.engine.tpu import guess_logprobs
from serving.engine.tpu.compile_watch import CompileWatch, StepShape
from serving.engine.tpu.grammar_rows import rows_as_read
from serving.engine.tpu.guess_programs import compile_guess_programs
from serving.engine.tpu.known_tokens import forget_unsampled, restore_known
from serving.engine.tpu.logits_programs import compile_logits_programs
from serving.engine.tpu.prompt_logprobs import done_prompts
from serving.engine.tpu.step_inputs import compile_step_inputs
from serving.link.vllm_codec import emitted_token_ids
from serving.tpu.host.locked_memory import raise_locked_memory
from serving.tpu.multislice import own_environment
from serving.tpu.rules import SLICE_IDS_VARIABLE

logger = logging.getLogger(__name__)


def restore_emitted(state: CachedRequestState) -> None:
    """Puts the emitted tokens back into `state`; a no-op for every other request. Idempotent."""
    emitted = emitted_token_ids(state.sampling_params)
    if emitted and len(state.output_token_ids) < len(emitted):
        state.output_token_ids[:] = emitted


class _ResumingInputBatch(InputBatch):
    def add_request(self, request: CachedRequestState, *args: Any, **kwargs: Any) -> Any:
        restore_emitted(request)
        added = super().add_request(request, *args, **kwargs)
        # One that comes back into the batch asks for its prompt again, though it may be done.
        if request.num_computed_tokens >= request.num_prompt_tokens:
            self.num_prompt_logprobs.pop(request.req_id, None)
        return added

    def forget_done_prompts(
        self, scheduler_output: Any, requests: Mapping[str, CachedRequestState]
    ) -> None:
        """Asks for no more log-probabilities of prompts that are done before this step."""
        if not self.num_prompt_logprobs:
            return
        going_on = scheduler_output.scheduled_cached_reqs
        num_computed = dict(zip(going_on.req_ids, going_on.num_computed_tokens, strict=True))
        # A thread of tpu-inference takes some out as well.
        asked = [name for name in list(self.num_prompt_logprobs) if name in requests]
        num_prompt = {name: requests[name].num_prompt_tokens for name in asked}
        for name in done_prompts(asked, num_computed, num_prompt):
            self.num_prompt_logprobs.pop(name, None)


class ResumingTPUWorker(ReportsStages, TPUWorker):
    """Runs tpu-inference's worker, one process per host; its batch restores emitted tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        guess_logprobs.install(tpu_runner)
        self._compile_watch = CompileWatch()
        if self.pp_config.pp_world_size > 1 and envs.TPU_MULTIHOST_BACKEND == "ray":
            # It listens there for the worker of the next stage: see `slice_executor`.
            self.pp_config.ip = own_address()

    def stage_address(self) -> str:
        """Returns where the worker of the next stage finds this one."""
        return str(self.pp_config.ip)

    def join_stages(self, addresses: list[str]) -> None:
        """Connects to the worker of the stage before; `addresses` has those of all, by rank."""
        if self.rank > 0:
            self.pp_config.prev_worker_ip = addresses[self.rank - 1]
        self.initialize_pp_transfer_connect()

    def report_compiles(self, address: RelayAddress, node_id: str) -> None:
        """Reports what is compiled here to the engine core on another host, that of `node_id`."""
        if own_node_id() != node_id:
            report_to(address)

    def init_device(self, *args: Any, **kwargs: Any) -> Any:
        """Sets which slice of a multislice its host belongs to, then does as the worker does.

        Here tpu-inference too sets what libtpu reads when it starts.
        """
        if complaint := raise_locked_memory(os.environ):
            # libtpu says what it could not lock; the cause is here.
            logger.warning("memory_not_lockable reason=%r", complaint)
        if SLICE_IDS_VARIABLE in os.environ:
            os.environ.update(own_environment(os.environ, own_node_id()))
        return super().init_device(*args, **kwargs)

    def compile_or_warm_up_model(self) -> Any:
        """Warms up as the worker does, and then the programs that it leaves out."""
        times = super().compile_or_warm_up_model()
        if not (envs.SKIP_JAX_PRECOMPILE or self.model_config.enforce_eager):
            started_s = time.monotonic()
            num_pairs = compile_step_inputs(self.model_runner)
            duration_ms = (time.monotonic() - started_s) * 1000
            logger.info("step_inputs_compiled pairs=%d duration_ms=%d", num_pairs, duration_ms)
            started_s = time.monotonic()
            num_shapes = compile_logits_programs(self.model_runner)
            num_shapes += compile_guess_programs(self.model_runner)
            duration_ms = (time.monotonic() - started_s) * 1000
            logger.info(
                "logits_programs_compiled shapes=%d duration_ms=%d", num_shapes, duration_ms
            )
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """Runs one step, with a batch that restores the emitted tokens of resumed requests.

        So it does for those that come back into the batch after a preemption.
        """
        batch = self.model_runner.input_batch
        # tpu-inference makes the batch itself, with no argument that selects its class. The
        # subclass adds no state, so the instance can change class.
        if type(batch) is InputBatch:
            batch.__class__ = _ResumingInputBatch
        requests = self.model_runner.requests
        batch.forget_done_prompts(scheduler_output, requests)
        restore_known(scheduler_output.scheduled_cached_reqs, requests, batch.req_id_to_index)
        forget_unsampled(self.model_runner._pre_async_results)
        self._compile_watch.step = StepShape(
            len(scheduler_output.num_scheduled_tokens), scheduler_output.total_num_scheduled_tokens
        )
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples as the worker does; each request under a grammar gets the mask that is its."""
        if grammar_output is not None:
            names, masks = rows_as_read(
                grammar_output.structured_output_request_ids,
                grammar_output.grammar_bitmask,
                self.model_runner.input_batch.req_id_to_index,
            )
            # A copy: the engine core may be this process, and reads its own again.
            grammar_output = dataclasses.replace(
                grammar_output, structured_output_request_ids=names, grammar_bitmask=masks
            )
        return super().sample_tokens(grammar_output)

    def watch_compilations(self) -> None:
        """Counts a program that is compiled from now on as one that warm-up has missed."""
        self._compile_watch.begin()

    def program_counts(self) -> tuple[int, int, int]:
        """Returns this host's numbers of programs: found in the cache, not found there, late."""
        watch = self._compile_watch
        return watch.num_hits, watch.num_lookups - watch.num_hits, watch.num_compilations

    def num_compilations(self) -> int:
        """Returns the programs compiled since `watch_compilations`, by this host's process."""
        return self._compile_watch.num_compilations
