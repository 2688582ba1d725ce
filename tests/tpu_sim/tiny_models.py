"""Tiny random checkpoints, their tokenizer, and what transformers and PEFT answer with them.

Run as a program it makes them in a process of its own (`python -m tests.tpu_sim.tiny_models
FOLDER`), or tells how far from the likeliest token each of an answer is (`... FOLDER MODEL <
ANSWERS`): torch and transformers then share nothing with the engine under test.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
# Experts, each token by two of eight.
MOE = "tiny-qwen3-moe"
_MOE_SHAPE = _SHAPE | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
# The first two with linear layers stored in fp8, a scale for each block; and what transformers
# computes with the weights that these stand for.
FP8, MOE_FP8 = "tiny-qwen3-fp8", "tiny-qwen3-moe-fp8"
STANDS_FOR = {FP8: "tiny-qwen3-rounded", MOE_FP8: "tiny-qwen3-moe-rounded"}
FP8_BLOCK = 64
# A target with enough layers for EAGLE-3, which reads three of them, and its draft model.
DRAFTED, DRAFT = "tiny-llama-drafted", "tiny-llama-draft"
# Of each answer that the draft learns.
NUM_DRAFTED_TOKENS = 96
DRAFTED_SHAPE = _SHAPE | {
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.1,
}
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

    def draft(self) -> str:
        """The folder of the draft, which the first call makes with its target (minutes)."""
        if not (self.folder / DRAFT).exists():
            command = [sys.executable, "-m", "tests.tpu_sim.tiny_models", str(self.folder), DRAFT]
            subprocess.run(command, cwd=PROJECT_ROOT, check=True)
        return self.path(DRAFT)

    def gaps(
        self, model: str, answers: list[list[int]], prompts: list[list[int]] | None = None
    ) -> list[list[float]]:
        """How much likelier transformers finds another token, for each token of each answer; nats.

        Answers to `prompts`, of any length; `None`: to ours. 0 for the likeliest token.
        """
        return self._judged(model, answers, prompts)["gaps"]

    def log_probabilities(
        self, model: str, answers: list[list[int]], prompts: list[list[int]] | None = None
    ) -> list[list[float]]:
        """What transformers gives each token of each answer; see `gaps`."""
        return self._judged(model, answers, prompts)["log_probabilities"]

    def _judged(
        self, model: str, answers: list[list[int]], prompts: list[list[int]] | None
    ) -> dict[str, list[list[float]]]:
        command = [sys.executable, "-m", "tests.tpu_sim.tiny_models", str(self.folder), model]
        asked = json.dumps({"prompts": prompts or self.prompts[model], "answers": answers})
        done = subprocess.run(
            command, cwd=PROJECT_ROOT, check=True, input=asked, capture_output=True, text=True
        )
        judged: dict[str, list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
        return judged


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
    for name, config in (
        (QWEN3, transformers.Qwen3Config(**_SHAPE)),
        (LLAMA, transformers.LlamaConfig(**_SHAPE)),
        (MOE, transformers.Qwen3MoeConfig(**_MOE_SHAPE)),
    ):
        model = transformers.AutoModelForCausalLM.from_config(config)
        model = model.to(torch.float32).eval()
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        expected[name] = list(_continuations(model, prompts))
    for name, source in ((FP8, QWEN3), (MOE_FP8, MOE)):
        _quantise(folder / source, folder / name, folder / STANDS_FOR[name])
        rounded = transformers.AutoModelForCausalLM.from_pretrained(folder / STANDS_FOR[name])
        expected[name] = list(_continuations(rounded.to(torch.float32).eval(), prompts))
    adapted = _adapted(folder)
    expected["adapter"] = list(_continuations(adapted, prompts))
    versions = {each.__name__: str(each.__version__) for each in (torch, transformers, peft)}
    made = {
        "prompts": dict.fromkeys([*expected, DRAFTED], prompts),
        "expected": expected,
        "versions": versions,
    }
    (folder / "reference.json").write_text(json.dumps(made))


def _write_drafted(folder: Path) -> None:
    """Writes the target, which is sure of its answers, and its draft, which is trained on them."""
    import torch
    import transformers

    from . import tiny_draft

    torch.manual_seed(0)
    prompts = json.loads((folder / "reference.json").read_text())["prompts"][DRAFTED]
    config = transformers.LlamaConfig(**DRAFTED_SHAPE)
    target = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    answers = list(_continuations(target, prompts, NUM_DRAFTED_TOKENS))
    tiny_draft.make_sure(target, prompts, answers)
    target.save_pretrained(folder / DRAFTED)
    transformers.AutoTokenizer.from_pretrained(folder / LLAMA).save_pretrained(folder / DRAFTED)
    answered = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    tiny_draft.write(folder / DRAFTED, folder / DRAFT, prompts, answered)


def _quantise(source: Path, target: Path, rounded: Path) -> None:
    """Stores `source` in fp8 by blocks, as published checkpoints are; and what that stands for."""
    import shutil

    from safetensors.torch import load_file, save_file

    for folder in (target, rounded):
        shutil.copytree(source, folder)
    stored, meant = {}, {}
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            stored[name] = meant[name] = weight
            continue
        values, scales = _in_blocks(weight)
        stored[name], stored[f"{name}_scale_inv"] = values, scales
        meant[name] = values.float() * _over_blocks(scales)
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    save_file(meant, rounded / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    # Published checkpoints name them, since vLLM would take the router's layer for one in fp8. To
    # tpu-inference such a name is the beginning of others: of `gate_proj`, in a model without.
    routers = [
        name.removesuffix(".weight") for name in weights if name.endswith(".mlp.gate.weight")
    ]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": ["lm_head", *routers],
    }
    (target / "config.json").write_text(json.dumps(config))


def _in_blocks(weight: Any) -> tuple[Any, Any]:
    """The weight in fp8, and a scale for each square of it, which it is to be multiplied by."""
    import torch

    num_out, num_in = weight.shape
    blocks = weight.reshape(num_out // FP8_BLOCK, FP8_BLOCK, num_in // FP8_BLOCK, FP8_BLOCK)
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = blocks.abs().amax(dim=(1, 3)) / largest
    values = (weight / _over_blocks(scales)).to(torch.float8_e4m3fn)
    return values, scales


def _over_blocks(scales: Any) -> Any:
    return scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)


def _print_judged(folder: Path, model: str) -> None:
    import torch
    import transformers

    asked = json.load(sys.stdin)
    name = STANDS_FOR.get(model, model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
    reference = reference.to(torch.float32).eval()
    told: dict[str, list[list[float]]] = {"gaps": [], "log_probabilities": []}
    for prompt, answer in zip(asked["prompts"], asked["answers"], strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0]
        given = logits[len(prompt) - 1 : -1]
        chosen = given.gather(1, torch.tensor(answer)[:, None])[:, 0]
        told["gaps"].append((given.max(dim=1).values - chosen).tolist())
        told["log_probabilities"].append((chosen - given.logsumexp(dim=1)).tolist())
    print(json.dumps(told))  # noqa: T201


def _continuations(
    model: object, prompts: list[list[int]], num_tokens: int = NUM_NEW_TOKENS
) -> Iterator[list[int]]:
    """One prompt at a time: no padding, nothing batched, nothing the reference could get wrong."""
    import torch

    for prompt in prompts:
        with torch.inference_mode():
            answer = model.generate(  # type: ignore[attr-defined]
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
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
    if len(sys.argv) == 2:
        _write(Path(sys.argv[1]))
    elif sys.argv[2] == DRAFT:
        _write_drafted(Path(sys.argv[1]))
    else:
        _print_judged(Path(sys.argv[1]), sys.argv[2])
