"""Trains the demo model from nothing and writes it as a Hugging Face folder.

Run: python -m scripts.demo_model.train --out models/slicewise-demo

The same seed, torch build, processor kind and thread count give the same weights. The model card
(README.md) in the folder is written by hand and left alone.
"""

import argparse
import itertools
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from scripts.demo_model.batches import IGNORED_LABEL, Batch, drill_batches, endless_batches, render
from scripts.demo_model.corpus import Corpus, load_corpus
from scripts.demo_model.examples import Mixture
from scripts.demo_model.tokenizer import END_OF_TEXT, MAX_POSITIONS, TURN_END, build_tokenizer

logger = logging.getLogger(__name__)

SEED = 20261120
NUM_STEPS = 1300
# Of these, the first are drills only. Mixed in from the start, longer drills with one repeat were
# still not learnt after 500 steps (one run, judged by the loss).
NUM_DRILL_STEPS = 150
NUM_THREADS = 2
WARMUP_STEPS = 30
# Peak rates, chosen once and not searched: Muon for the matrices, AdamW for the rest.
MUON_RATE = 0.02
ADAM_RATE = 4e-3
# Examples whose text the tokenizer is trained on, besides the corpus itself.
TOKENIZER_EXAMPLES = 4000
LOG_EVERY_STEPS = 50


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained model for `tokenizer`, in float32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,  # one of the head sizes that vLLM's CPU attention accepts
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )
    return Qwen3ForCausalLM(config)


def train_tokenizer(corpus: Corpus, rng: random.Random) -> PreTrainedTokenizerFast:
    """The tokenizer for `corpus` and a sample of the conversations made from it."""
    bare = build_tokenizer([])
    rendered = (render(example, bare) for example in Mixture(corpus, rng).draw(TOKENIZER_EXAMPLES))
    return build_tokenizer([*corpus.texts(), *(text for pair in rendered for text in pair)])


def train(model: Qwen3ForCausalLM, batches: Iterator[Batch], num_steps: int) -> None:
    """Train `model` in place for `num_steps` batches, in bfloat16 where autocast allows."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = (
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate_share(step, num_steps))
        for o in optimizers
    ]
    model.train()
    mean_loss = 0.0
    for step in range(1, num_steps + 1):
        loss = batch_loss(model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        mean_loss += loss.item() / LOG_EVERY_STEPS
        if step % LOG_EVERY_STEPS == 0:
            logger.info("step=%d of=%d mean_loss=%.4f", step, num_steps, mean_loss)
            mean_loss = 0.0


def rate_share(step: int, num_steps: int) -> float:
    """The share of the peak rate at `step`: a short rise, then a straight line down to zero."""
    return min((step + 1) / WARMUP_STEPS, (num_steps - step) / num_steps)


def batch_loss(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross entropy over the reply tokens of `batch`."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Causal attention never looks right, where the padding is, so no mask is needed.
        hidden = model.model(input_ids=batch.token_ids).last_hidden_state[:, :-1]
        labels = batch.labels[:, 1:]
        is_reply = labels != IGNORED_LABEL
        logits = model.lm_head(hidden[is_reply])
    return cross_entropy(logits.float(), labels[is_reply])


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights in bfloat16, configuration, tokenizer and sampling defaults to `out`."""
    model = model.to(torch.bfloat16)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (TURN_END, END_OF_TEXT)]
    # A small model is readable only near its most likely tokens, so sampling stays close to them.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.2,
        top_p=0.9,
        eos_token_id=ends,
        pad_token_id=ends[1],
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _name_tokenizer_class(out / "tokenizer_config.json")


def _name_tokenizer_class(path: Path) -> None:
    """Write the class name that every release of transformers knows; release 5 writes its own."""
    config = json.loads(path.read_text(encoding="utf-8")) | {
        "tokenizer_class": "PreTrainedTokenizerFast"
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(NUM_THREADS)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    corpus = load_corpus()
    tokenizer = train_tokenizer(corpus, rng)
    model = build_model(tokenizer)
    logger.info("parameters=%d vocabulary=%d", model.num_parameters(), len(tokenizer))
    drills = itertools.islice(drill_batches(tokenizer, rng), NUM_DRILL_STEPS)
    batches = endless_batches(Mixture(corpus, rng), tokenizer, rng)
    train(model, itertools.chain(drills, batches), arguments.steps)
    save(model, tokenizer, arguments.out)
    logger.info("written to=%s", arguments.out)


if __name__ == "__main__":
    main()
