"""Gives a resumed request its emitted tokens back in vLLM's CPU worker.

The scheduler (`resume_scheduler`) sends a resumed request as a new one: prompt only. Here, just
before the request enters the batch, the emitted tokens become its output again. So penalties,
bad words, minimum length, thinking budgets and all other readers of output work as if it had never
moved, and a seeded generator is wound forward past the draws already made.
"""

from typing import Any

import torch
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from serving.engine.load_stage import ReportsStages
from serving.link.vllm_codec import emitted_token_ids


def restore_emitted(state: CachedRequestState) -> None:
    """Puts the emitted tokens back into `state`; a no-op for every other request. Idempotent."""
    emitted = emitted_token_ids(state.sampling_params)
    if not emitted or len(state.output_token_ids) >= len(emitted):
        return
    state.output_token_ids[:] = emitted
    if state.generator is not None:
        wind_forward(state.generator, len(emitted))


def wind_forward(generator: torch.Generator, num_tokens: int) -> None:
    """Consumes what vLLM's CPU sampler consumes of a request's generator for `num_tokens` tokens.

    That is one 31-bit integer per token (`TopKTopPSampler.forward_cpu`, vLLM 0.32.0).
    """
    for _ in range(num_tokens):
        torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)


class _ResumingInputBatch(InputBatch):
    def add_request(self, request: CachedRequestState) -> int:
        restore_emitted(request)
        index: int = super().add_request(request)
        return index


class ResumingCPUWorker(ReportsStages, CPUWorker):
    """Runs vLLM's CPU worker with a batch that restores emitted tokens."""

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        """Runs one step, with a batch that restores the emitted tokens of resumed requests."""
        batch = self.model_runner.input_batch
        # vLLM makes the batch itself, and makes it anew when the KV cache layout changes, with no
        # argument that selects its class. The subclass adds no state, so the instance can change
        # class.
        if type(batch) is InputBatch:
            batch.__class__ = _ResumingInputBatch
        return super().execute_model(scheduler_output)
