"""Judges greedy answers by transformers on this host's CPU, in a process of its own.

    python -m deployments.first_run.requests.reference MODEL DTYPE < answers.json

The input is a list of pairs: the token ids of a prompt and of its answer. The output is a list with
one list a pair: of each token of the answer its gap and its step. The gap is how much less likely
the token is to the reference than the reference's own choice, in nats; 0 where it is that choice.
The step is how far apart two numbers of the model's type are that are as large as the best logit:
nearer ones may be rounded to either order. The reference is given the answer as it is, so that one
token that differs says nothing against those that follow. DTYPE of `auto` is the model's own.
"""

import json
import sys
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM


class Gap(NamedTuple):
    """How a token compares with the reference's own choice, in nats. See the module."""

    nats: float
    step: float


def main(model_name: str, dtype: str, pairs: list[tuple[list[int], list[int]]]) -> list[list[Gap]]:
    """Returns the gaps of each pair."""
    chosen = "auto" if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=chosen).eval()
    return [gaps(model, prompt, answer) for prompt, answer in pairs]


def gaps(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> list[Gap]:
    """Returns the gap of each token of one answer."""
    tokens = torch.tensor([[*prompt, *answer]])
    with torch.inference_mode():
        logits = model(tokens).logits[0]  # f[prompt + answer, vocabulary]
    # The logits at a position are of the token after it.
    of_answer = logits[len(prompt) - 1 : -1]
    chances = torch.log_softmax(of_answer.float(), dim=-1)
    own = chances.gather(1, torch.tensor(answer)[:, None])[:, 0]
    nats = chances.max(dim=-1).values - own
    steps = steps_at(of_answer.max(dim=-1).values)
    return [Gap(*each) for each in zip(nats.tolist(), steps.tolist(), strict=True)]


def steps_at(numbers: torch.Tensor) -> torch.Tensor:
    """Returns how far the next larger number of the same type is from each, in float32."""
    exponents = torch.floor(torch.log2(numbers.abs().float().clamp(min=1e-6)))
    return torch.finfo(numbers.dtype).eps * torch.exp2(exponents)


if __name__ == "__main__":
    torch.manual_seed(0)
    json.dump(main(sys.argv[1], sys.argv[2], json.load(sys.stdin)), sys.stdout)
