"""Judges greedy answers by transformers on this host's CPU, in a process of its own.

    python -m deployments.first_run.requests.reference MODEL DTYPE < answers.json

The input is a list of pairs: the token ids of a prompt and of its answer. The output is a list with
one list a pair: of each token of the answer, how much less likely it is to the reference than the
reference's own choice, in nats; 0 where it is that choice. The reference is given the answer as it
is, so that one token that differs says nothing against those that follow. DTYPE of `auto` is the
model's own.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main(
    model_name: str, dtype: str, pairs: list[tuple[list[int], list[int]]]
) -> list[list[float]]:
    """Returns the gaps of each pair."""
    chosen = "auto" if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=chosen).eval()
    return [gaps(model, prompt, answer) for prompt, answer in pairs]


def gaps(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> list[float]:
    """Returns the gap of each token of one answer, in nats."""
    tokens = torch.tensor([[*prompt, *answer]])
    with torch.inference_mode():
        logits = model(tokens).logits[0]  # f[prompt + answer, vocabulary]
    # The logits at a position are of the token after it.
    chances = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), dim=-1)
    own = chances.gather(1, torch.tensor(answer)[:, None])[:, 0]
    found: list[float] = (chances.max(dim=-1).values - own).tolist()
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    json.dump(main(sys.argv[1], sys.argv[2], json.load(sys.stdin)), sys.stdout)
