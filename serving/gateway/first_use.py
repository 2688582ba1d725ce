"""What libraries put off until it is first used is done before a gateway has clients.

On the event loop each of these would be a turn of its own, in which everybody waits.
"""

import sys
from collections.abc import Iterator

from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from vllm.v1.sample.logits_processor import cached_load_custom_logitsprocs

# Whose modules name the models that answers are made of.
_API = "vllm.entrypoints."


async def do_what_was_put_off() -> None:
    """Does it, in a thread as far as it computes. Call it after vLLM's API was imported."""
    # Starlette's own way, because it imports what every streamed answer needs: 14 ms (anyio 4.16).
    await run_in_threadpool(_compute)


def _compute() -> None:
    # Reads the entry points of every installed package: 20 ms (vllm 0.32).
    cached_load_custom_logitsprocs(None)
    for model in _deferred_models():
        model.model_rebuild(raise_errors=False)


def _deferred_models() -> Iterator[type[BaseModel]]:
    """Yields the models of vLLM's API that pydantic would build where they are first made.

    All of the `openai` package are declared so: 20 to 40 ms each for the larger events of
    `/v1/responses` (openai 3.54; 2026-11-26).
    """
    modules = [module for name, module in [*sys.modules.items()] if name.startswith(_API)]
    named = [value for module in modules for value in [*vars(module).values()]]
    for kind in dict.fromkeys(value for value in named if isinstance(value, type)):
        if issubclass(kind, BaseModel) and kind is not BaseModel and not kind.__pydantic_complete__:
            yield kind
