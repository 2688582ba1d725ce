"""Keeps the policy's plan report, and what it has learned, in Ray's own key-value store.

A key for the report, and one for the memory of each model. What is remembered is read once, when a
policy begins; whatever is wrong with it is logged, and the policy begins without.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

from ray.experimental import internal_kv

from autoscaling.policy.memory import (
    PolicyMemoryError,
    PolicyRecord,
    decode_memory,
    encode_memory,
)
from autoscaling.policy_config import ModelSettings
from serving.domain.plan_report import REPORT_KEY, PlanReport, encode_report

logger = logging.getLogger("ray.serve.slicewise")

# How long a policy waits for what was learned before it: the controller waits with it.
_READ_S = 2.0


def write_plan_report(board: PlanReport) -> None:
    """Replaces the report. Blocks for a round trip to Ray's head: call it in a thread."""
    internal_kv._internal_kv_put(REPORT_KEY, encode_report(board), overwrite=True)


def write_policy_memory(model: str, record: PolicyRecord) -> None:
    """Replaces the memory of one model; blocks as `write_plan_report` does."""
    internal_kv._internal_kv_put(_memory_key(model), encode_memory(record), overwrite=True)


def read_policy_memory(model: str) -> bytes | None:
    """Returns the memory of one model; `None` if there is none. Blocks as well."""
    text: bytes | None = internal_kv._internal_kv_get(_memory_key(model))
    return text


def recall_memories(
    models: Iterable[ModelSettings],
    now_s: float,
    executor: Executor,
    read: Callable[[str], bytes | None] = read_policy_memory,
) -> dict[str, PolicyRecord]:
    """Returns what was learned before, by model, of the models of which it can be used.

    Reads in a thread of `executor`, and waits for it two seconds at most.
    """
    settings = {each.model: each for each in models}
    reading = executor.submit(lambda: {model: read(model) for model in settings})
    try:
        texts = reading.result(_READ_S)
    except Exception as error:  # noqa: BLE001 - whatever ails the head, the policy goes on
        logger.warning("policy_memory_not_read reason=%r", error)
        return {}
    found: dict[str, PolicyRecord] = {}
    for model, text in texts.items():
        if text is None:
            continue
        try:
            found[model] = decode_memory(text, settings[model].slice_shape, now_s)
        except PolicyMemoryError as error:
            logger.warning("policy_memory_ignored model=%s reason=%r", model, str(error))
        else:
            age_s = now_s - found[model].written_at_s
            logger.info("policy_memory_recalled model=%s age_s=%.0f", model, age_s)
    return found


def _memory_key(model: str) -> bytes:
    return f"slicewise:policy-memory:{model}".encode()
