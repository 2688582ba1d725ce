"""Sixteen streams of every kind that two vLLM engines answer, and a signal in the midst of them."""

import os
import signal
import time
from typing import Any

from .streams import Answer, Request

MODEL = "slicewise-demo"
NUM_TOKENS = 400

INVENTORY = {
    "type": "object",
    "properties": {
        "slices": {
            "type": "array",
            "minItems": 12,
            "maxItems": 16,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-z]{3,6}$"},
                    "chips": {"type": "integer", "minimum": 0, "maximum": 999},
                },
                "required": ["name", "chips"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["slices"],
    "additionalProperties": False,
}


def completion(prompt: str, **options: Any) -> Request:
    defaults = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS}
    defaults |= {"ignore_eos": True, "return_token_ids": True}
    return Request("/v1/completions", defaults | options)


def chat(question: str, **options: Any) -> Request:
    defaults = {"model": MODEL, "messages": [{"role": "user", "content": question}]}
    defaults |= {"temperature": 0, "max_tokens": 700, "return_token_ids": True}
    return Request("/v1/chat/completions", defaults | options)


def inventory(question: str) -> Request:
    schema = {"name": "inventory", "schema": INVENTORY, "strict": True}
    return chat(question, response_format={"type": "json_schema", "json_schema": schema})


PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
WORKLOAD = [
    *(completion(f"What is slice number {number}?") for number in range(4)),
    completion("A slice is", **PENALTIES),
    completion("A host is", **PENALTIES),
    completion("The gateway", logprobs=2),
    completion("The engine", logprobs=2, **PENALTIES),
    completion("Two samples:", n=2, temperature=0.8, seed=7),
    completion("A seeded sample:", temperature=0.9, seed=8),
    completion("Never again:", bad_words=["slice", "the chip"]),
    chat("What is Slicewise?", min_tokens=250),
    chat(
        "What is a compute class?",
        logprobs=True,
        top_logprobs=2,
        ignore_eos=True,
        max_tokens=NUM_TOKENS,
    ),
    *(inventory(f"List the slices of zone {zone}.") for zone in "abc"),
]
INVENTORIES = [at for at, request in enumerate(WORKLOAD) if "response_format" in request.body]


class Disturbance:
    """Sends a signal, once, when a stream has come to a token. `at_s` is when (monotonic)."""

    def __init__(self, pid: int, number: signal.Signals, stream: int, position: int) -> None:
        self._pid = pid
        self._signal = number
        self._stream = stream
        self._position = position
        self.at_s: float | None = None

    def __call__(self, number: int, answer: Answer) -> None:
        is_due = number == self._stream and answer.num_tokens >= self._position
        if self.at_s is None and is_due:
            os.kill(self._pid, self._signal)
            self.at_s = time.monotonic()
