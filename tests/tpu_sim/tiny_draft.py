"""A draft model for EAGLE-3, trained for seconds to guess a tiny target's answers to our prompts.

A draft of random weights would never be right, and what is done with right guesses never be run.
Its layer is that of tpu-inference 0.32.0 (`models/jax/llama_eagle3.py`): at position p it has the
embedding of token p + 1 and three of the target's hidden states of token p, and guesses p + 2.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

_NUM_STEPS = 120
_LEARNING_RATE = 3e-3
_NUM_SURE_STEPS = 25
_SURE_LEARNING_RATE = 1e-3
# Of n layers: 2, n / 2 and n - 3; the states before them.
_AUXILIARY = (2, 3, 4)


class _Draft(torch.nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.fc = torch.nn.Linear(3 * width, width, bias=False)
        self.input_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            width_out = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, torch.nn.Linear(2 * width, width_out, bias=False))
        self.mlp = LlamaMLP(config)
        self.lm_head = torch.nn.Linear(width, config.vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Logits of the token after the next; [token, vocabulary], of one sequence."""
        residual = self.fc(states)[None]
        normed = self.input_layernorm(embedded[None]), self.hidden_norm(residual)
        both = torch.cat(normed, dim=-1)
        places = torch.arange(both.shape[1])[None]
        attended, _ = self.self_attn(both, self.rotary(both, places), None)
        residual = residual + attended
        residual = residual + self.mlp(self.post_attention_layernorm(residual))
        return self.lm_head(self.norm(residual))[0]


def make_sure(target: Any, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Trains a target of random weights until its own answers are nats likelier than any others.

    Otherwise it answers in bfloat16 what it does not in float32, and a draft that has learned the
    one is never right about the other.
    """
    pairs = list(zip(prompts, answers, strict=True))
    _train(
        target,
        _NUM_SURE_STEPS,
        _SURE_LEARNING_RATE,
        lambda: [
            torch.nn.functional.cross_entropy(
                target(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1],
                torch.tensor(answer),
            )
            for prompt, answer in pairs
        ],
    )


def _train(
    model: torch.nn.Module, num_steps: int, rate: float, losses: Callable[[], list[torch.Tensor]]
) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(num_steps):
        mean = torch.stack(losses()).mean()
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()


def write(target: Path, folder: Path, prompts: list[list[int]], answered: list[list[int]]) -> None:
    """Trains the draft of the model in `target` on its own answers, and writes it to `folder`.

    `answered` are the prompts with what it answers.
    """
    model = AutoModelForCausalLM.from_pretrained(target).to(torch.float32).eval()
    config = model.config
    config._attn_implementation = "sdpa"
    pairs = zip(prompts, answered, strict=True)
    examples = [_example(model, len(prompt), tokens) for prompt, tokens in pairs]
    torch.manual_seed(1)
    draft = _Draft(config)
    _train(
        draft,
        _NUM_STEPS,
        _LEARNING_RATE,
        lambda: [
            torch.nn.functional.cross_entropy(draft(embedded, states)[first:], wanted[first:])
            for embedded, states, wanted, first in examples
        ],
    )
    folder.mkdir()
    save_file(_stored(draft, config.vocab_size), folder / "model.safetensors", {"format": "pt"})
    written = json.loads((target / "config.json").read_text())
    written |= {"num_hidden_layers": 1, "draft_vocab_size": config.vocab_size, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(written))


def _example(
    model: Any, num_prompt: int, tokens: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Embeddings, states and wanted tokens of one answer, and where in them the answer begins."""
    given = torch.tensor([tokens])
    with torch.no_grad():
        seen = model(given, output_hidden_states=True)
        states = torch.cat([seen.hidden_states[layer][0] for layer in _AUXILIARY], dim=-1)
        embedded = model.get_input_embeddings()(given[0])
    return embedded[1:-1], states[:-2], given[0, 2:], max(0, num_prompt - 2)


def _stored(draft: _Draft, vocab_size: int) -> dict[str, torch.Tensor]:
    """The draft's weights by the names of published ones; its embedding is the target's."""
    outside = ("fc.", "norm.", "lm_head.")
    weights = {
        name if name.startswith(outside) else f"midlayer.{name}": weight.to(torch.bfloat16)
        for name, weight in draft.state_dict().items()
        if not name.startswith("rotary")
    }
    # How far the target's number of a token is from the draft's: they have the same tokens.
    return weights | {"d2t": torch.zeros(vocab_size, dtype=torch.int32)}
