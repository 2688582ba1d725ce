"""A tiny model that sees: BLIP-2 of random weights, with a tokenizer and a processor of its own.

Run as a program it writes one (`python -m tests.tiny_vision_model FOLDER`): torch and transformers
then share nothing with the engine under test.
"""

import base64
import io
import subprocess
import sys
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[1]
IMAGE_TOKEN = "<image>"
_IMAGE_PIXELS = 56
NUM_IMAGE_TOKENS = 8
_SPECIAL = ["<|pad|>", "<|start|>", "<|end|>", IMAGE_TOKEN]
_VOCAB_SIZE = 320
# Wide enough that another image changes the most likely tokens.
_SPREAD = 0.3
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make(folder: Path) -> Path:
    """Makes one in `folder`, in a process of its own (10 to 30 s)."""
    command = [sys.executable, "-m", "tests.tiny_vision_model", str(folder)]
    subprocess.run(command, cwd=PROJECT_ROOT, check=True, capture_output=True)
    return folder


def image_url(number: int) -> str:
    """A `data:` URL of the image with this number: each has colours of its own."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


# -- what follows runs in that process --


def _write(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    text = transformers.OPTConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=128,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        init_std=_SPREAD,
    )
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    query = {**vision, "encoder_hidden_size": 64, "vocab_size": _VOCAB_SIZE}
    layers = {"num_hidden_layers": 2, "initializer_range": _SPREAD}
    config = transformers.Blip2Config(
        vision_config={**vision, **layers, "image_size": _IMAGE_PIXELS, "patch_size": 14},
        qformer_config={**query, **layers, "cross_attention_frequency": 1},
        text_config=text.to_dict(),
        num_query_tokens=NUM_IMAGE_TOKENS,
        image_token_index=_SPECIAL.index(IMAGE_TOKEN),
        initializer_range=_SPREAD,
    )
    model = transformers.Blip2ForConditionalGeneration(config).to(torch.float32)
    torch.nn.init.normal_(model.query_tokens, std=1.0)
    model.save_pretrained(folder)
    tokenizer = _tokenizer()
    tokenizer.chat_template = _CHAT_TEMPLATE  # type: ignore[attr-defined]
    side = {"height": _IMAGE_PIXELS, "width": _IMAGE_PIXELS}
    transformers.Blip2Processor(
        transformers.BlipImageProcessorPil(size=side), tokenizer, num_query_tokens=NUM_IMAGE_TOKENS
    ).save_pretrained(folder)


def _tokenizer() -> object:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=_SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["which colours has the image"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_SPECIAL[0],
        bos_token=_SPECIAL[1],
        eos_token=_SPECIAL[2],
        extra_special_tokens={"image_token": IMAGE_TOKEN},
    )


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
