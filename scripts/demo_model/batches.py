"""Examples as padded token batches, with the loss on the reply only."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from scripts.demo_model.examples import Example, Mixture
from scripts.demo_model.tokenizer import END_OF_TEXT, SPECIAL_TOKENS, TURN_END

# torch's cross entropy skips this label.
IGNORED_LABEL = -100
# Padded tokens per batch; and examples drawn at a time, so that batches hold similar lengths.
BATCH_TOKENS = 4096
DRAW_COUNT = 1024
# A drill is a few random tokens several times over. Drills make the attention heads that find an
# earlier token and copy what followed it, without which tool arguments come out wrong.
DRILL_COUNT = 100
DRILL_MAX_TOKENS = 10
DRILL_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and labels, both i64[sequence, position], padded on the right."""

    token_ids: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sequence:
    """One encoded example; the first `num_prompt` tokens carry no loss."""

    token_ids: list[int]
    num_prompt: int


def render(example: Example, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """The prompt and the completion of `example` as text."""
    if not example.messages:
        return "", example.reply + END_OF_TEXT
    prompt = tokenizer.apply_chat_template(
        list(example.messages),
        tools=example.tools or None,
        add_generation_prompt=True,
        enable_thinking=example.thought is not None,
        tokenize=False,
    )
    thinking = "" if example.thought is None else f"<think>\n{example.thought}\n</think>\n\n"
    return str(prompt), thinking + example.reply + TURN_END


def encode(example: Example, tokenizer: PreTrainedTokenizerFast) -> Sequence:
    """`example` as tokens, prompt and completion encoded apart, as a server sees them."""
    prompt, completion = render(example, tokenizer)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    completion_ids = tokenizer.encode(completion, add_special_tokens=False)
    # The first token of plain text has nothing before it, so it cannot be learnt.
    return Sequence(prompt_ids + completion_ids, len(prompt_ids))


def drill_batches(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[Batch]:
    """Batches of drills only, without end."""
    while True:
        yield from _grouped([_drill(len(tokenizer), rng) for _ in range(DRILL_COUNT)], rng)


def endless_batches(
    mixture: Mixture, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> Iterator[Batch]:
    """Batches of examples and some drills, without end."""
    while True:
        sequences = [encode(example, tokenizer) for example in mixture.draw(DRAW_COUNT)]
        sequences += [_drill(len(tokenizer), rng) for _ in range(DRILL_COUNT)]
        yield from _grouped(sequences, rng)


def _drill(num_tokens: int, rng: random.Random) -> Sequence:
    length = rng.randint(3, DRILL_MAX_TOKENS)
    token_ids = rng.choices(range(len(SPECIAL_TOKENS), num_tokens), k=length)
    return Sequence(token_ids * DRILL_REPEATS, length + 1)


def _grouped(sequences: list[Sequence], rng: random.Random) -> list[Batch]:
    """`sequences` in batches of similar length and about `BATCH_TOKENS` padded tokens, shuffled."""
    groups: list[list[Sequence]] = [[]]
    for sequence in sorted(sequences, key=lambda sequence: len(sequence.token_ids)):
        if len(sequence.token_ids) * (len(groups[-1]) + 1) > BATCH_TOKENS and groups[-1]:
            groups.append([])
        groups[-1].append(sequence)
    rng.shuffle(groups)
    return [_pad(group) for group in groups]


def _pad(group: list[Sequence]) -> Batch:
    longest = max(len(sequence.token_ids) for sequence in group)
    token_ids = torch.zeros((len(group), longest), dtype=torch.long)
    labels = torch.full((len(group), longest), IGNORED_LABEL, dtype=torch.long)
    for row, sequence in enumerate(group):
        ids = torch.tensor(sequence.token_ids)
        token_ids[row, : len(ids)] = ids
        labels[row, sequence.num_prompt : len(ids)] = ids[sequence.num_prompt :]
    return Batch(token_ids, labels)
