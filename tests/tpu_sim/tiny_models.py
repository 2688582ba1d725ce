"""Tiny random checkpoints, their tokenizer, and what transformers and PEFT answer with them.

Run as a program it does one of both in a process of its own (`python -m tests.tpu_sim.tiny_models
FOLDER`): torch and transformers then share nothing with the engine under test.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[2]
NUM_NEW_TOKENS = 24
# The two longest do not fit one step of 64 tokens; the first two share all but their end.
_SENTENCE = "a slice is a set of chips joined by a fast network, and a host is one machine of it. "
PROMPTS = (
    _SENTENCE * 6,
    _SENTENCE * 5 + "a chip is what is paid for",
    "which host is it",
    "one two three four five six seven",
    "the slice goes",
    '{"chips": 4, "hosts": [0, 1]}',
)
# The same shapes for both: every TP of 1, 2, 4 and 8 divides heads and KV heads, and a head
# has the size that the real kernel takes.
_SHAPE = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Wide enough that a wrong position, head or page changes the most likely token.
    "initializer_range": 0.3,
}
QWEN3, LLAMA = "tiny-qwen3", "tiny-llama"
LORA_RANK = 8
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyModels:
    """The folder of each, and what the reference answers: model, then prompt, then token ids."""

    folder: Path
    prompts: dict[str, list[list[int]]]
    expected: dict[str, list[list[int]]]
    versions: dict[str, str]

    def path(self, model: str) -> str:
        return str(self.folder / model)

    @property
    def adapter(self) -> str:
        return str(self.folder / "adapter")


def token_text(models: TinyModels, token_ids: list[int]) -> str:
    """The text of tokens, by the tokenizer that all of them have."""
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(models.path(QWEN3)).decode(token_ids))


def make(folder: Path) -> TinyModels:
    """Makes them below `folder`, in a process of its own (20 to 40 s)."""
    command = [sys.executable, "-m", "tests.tpu_sim.tiny_models", str(folder)]
    subprocess.run(command, cwd=PROJECT_ROOT, check=True)
    made = json.loads((folder / "reference.json").read_text())
    return TinyModels(folder, made["prompts"], made["expected"], made["versions"])


# -- what follows runs in that process --


def _write(folder: Path) -> None:
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = _tokenizer(folder)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    expected = {}
    for name, config_class in (
        (QWEN3, transformers.Qwen3Config),
        (LLAMA, transformers.LlamaConfig),
    ):
        model = transformers.AutoModelForCausalLM.from_config(config_class(**_SHAPE))
        model = model.to(torch.float32).eval()
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        expected[name] = list(_continuations(model, prompts))
    adapted = _adapted(folder)
    expected["adapter"] = list(_continuations(adapted, prompts))
    versions = {each.__name__: str(each.__version__) for each in (torch, transformers, peft)}
    made = {
        "prompts": dict.fromkeys(expected, prompts),
        "expected": expected,
        "versions": versions,
    }
    (folder / "reference.json").write_text(json.dumps(made))


def _continuations(model: object, prompts: list[list[int]]) -> Iterator[list[int]]:
    """One prompt at a time: no padding, nothing batched, nothing the reference could get wrong."""
    import torch

    for prompt in prompts:
        with torch.inference_mode():
            answer = model.generate(  # type: ignore[attr-defined]
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_NEW_TOKENS,
                min_new_tokens=NUM_NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        yield answer[0, len(prompt) :].tolist()


def _adapted(folder: Path) -> object:
    """The Qwen3 model under an adapter of random weights, which is written as well."""
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder / QWEN3, dtype=torch.float32
    ).eval()
    config = peft.LoraConfig(
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        target_modules=["q_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(folder / QWEN3),
    )
    adapted = peft.get_peft_model(base, config)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(folder / "adapter")
    return adapted.eval()


def _tokenizer(folder: Path) -> object:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|start|>", "<|end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_SHAPE["vocab_size"],
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(PROMPTS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], bos_token=special[0], eos_token=special[2]
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
