"""Measures what a trained demo model recalls, as shares of exactly right greedy replies.

Run: python -m scripts.demo_model.evaluate models/slicewise-demo

Prints one JSON object. `trained` and `held_out` are questions seen and never seen in training; the
tool and JSON cases are drawn from a seed that training does not use.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from scripts.demo_model.batches import render
from scripts.demo_model.corpus import Corpus, load_corpus
from scripts.demo_model.examples import Example, Message
from scripts.demo_model.json_docs import draw_json_case
from scripts.demo_model.tokenizer import TURN_END
from scripts.demo_model.tools import (
    ToolCase,
    generic_case,
    list_slices_case,
    offer,
    slice_status_case,
    weather_case,
)

EVALUATION_SEED = 7
NUM_CASES = 50
MAX_NEW_TOKENS = 160
BATCH_SIZE = 50


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A loaded model with its tokenizer."""

    model: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerFast

    def reply(self, example: Example, temperature: float | None = None) -> str:
        """The reply to `example`'s conversation; None means greedy, else plain sampling."""
        return self.replies([example], temperature)[0]

    def replies(self, examples: list[Example], temperature: float | None = None) -> list[str]:
        """The replies to several conversations, computed as one batch."""
        prompts = [render(example, self.tokenizer)[0] for example in examples]
        inputs = self.tokenizer(
            prompts,
            return_tensors="pt",
            add_special_tokens=False,
            padding_side="left",
            padding=True,
        )
        sampling = {"do_sample": False, "temperature": None, "top_p": None}
        if temperature is not None:
            sampling = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=MAX_NEW_TOKENS,
                **sampling,
            )
        texts = self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
        return [text.split(TURN_END)[0] for text in texts]


def load_model(folder: Path) -> DemoModel:
    """The model in `folder`, in the bfloat16 it is stored in, on the CPU."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return DemoModel(model, AutoTokenizer.from_pretrained(folder))


def ask(question: str, reply: str = "", *, thought: str | None = None) -> Example:
    """A one-turn example with `reply` as the expected answer."""
    return Example(({"role": "user", "content": question},), reply, thought)


def question_sets(corpus: Corpus, rng: random.Random) -> dict[str, list[Example]]:
    """The sets of examples to measure, by name."""
    pairs = [(q, item.answer) for item in corpus.items for q in corpus.questions_of(item)]
    off_topic = corpus.off_topic
    follow_ups = [
        (item, question)
        for item in corpus.items
        if item.follow_up is not None
        for question in item.follow_up.ask
    ]
    return {
        "trained": [ask(q, a) for q, a in pairs],
        "held_out": [ask(item.held_out, item.answer) for item in corpus.items],
        "off_topic_trained": [ask(q, off_topic.answer) for q in off_topic.ask],
        "off_topic_held_out": [ask(q, off_topic.answer) for q in off_topic.held_out],
        "follow_up": [
            Example(
                (
                    {"role": "user", "content": corpus.questions_of(item)[0]},
                    {"role": "assistant", "content": item.answer},
                    {"role": "user", "content": question},
                ),
                item.follow_up.answer if item.follow_up else "",
            )
            for item, question in follow_ups
        ],
        "json": [ask(*draw_json_case(rng)) for _ in range(NUM_CASES)],
        **_tool_sets(rng),
    }


def _tool_sets(rng: random.Random) -> dict[str, list[Example]]:
    kinds: dict[str, Callable[[random.Random], ToolCase]] = {
        "slice_status": slice_status_case,
        "weather": weather_case,
        "list_slices": list_slices_case,
        "made_up_tool": generic_case,
    }
    sets: dict[str, list[Example]] = {}
    for name, make in kinds.items():
        cases = [make(rng) for _ in range(NUM_CASES)]
        sets[f"{name}_call"] = [Example(_asked(c), c.call_text, None, offer(c, rng)) for c in cases]
        sets[f"{name}_result"] = [
            Example(_answered(c), c.sentence, None, offer(c, rng)) for c in cases
        ]
    return sets


def _asked(case: ToolCase) -> tuple[Message, ...]:
    return ({"role": "user", "content": case.question},)


def _answered(case: ToolCase) -> tuple[Message, ...]:
    call = {"function": {"name": case.name, "arguments": case.arguments}}
    return (
        *_asked(case),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": case.result},
    )


def misses(model: DemoModel, examples: list[Example]) -> list[tuple[Example, str]]:
    """The examples whose greedy reply is not exactly right, with that reply."""
    batches = [examples[at : at + BATCH_SIZE] for at in range(0, len(examples), BATCH_SIZE)]
    pairs = [pair for batch in batches for pair in zip(batch, model.replies(batch), strict=True)]
    return [(example, reply) for example, reply in pairs if reply != example.reply]


def main() -> None:
    """Evaluate the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--show-misses", action="store_true", help="print each wrong reply")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    model = load_model(arguments.folder)
    shares: dict[str, str] = {}
    for name, examples in question_sets(load_corpus(), random.Random(EVALUATION_SEED)).items():
        missed = misses(model, examples)
        shares[name] = f"{len(examples) - len(missed)}/{len(examples)}"
        if arguments.show_misses:
            for example, reply in missed:
                line = {"set": name, "asked": example.messages[-1]["content"], "reply": reply}
                sys.stdout.write(json.dumps(line | {"expected": example.reply}) + "\n")
    sys.stdout.write(json.dumps(shares, indent=2) + "\n")


if __name__ == "__main__":
    main()
