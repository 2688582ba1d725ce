"""An answer's text, begun from the end of its prompt, against the text begun from all of it."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from serving.artifacts.model_source import resolve_source
from serving.gateway.streams.detokenizing import tail_of

pytestmark = pytest.mark.imports_vllm

SOURCE = "models/slicewise-demo"
# Characters of one to four bytes.
WORDS = ["▁a", "▁the", "é", "chip", "▁", ".", "語"]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "byte-level":
        return Tokenizer.from_file(f"{resolve_source(SOURCE)}/tokenizer.json")
    # As Llama 2's: characters that it does not know are rows of bytes.
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def text_after(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> list[str | None]:
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    return [stream.step(tokenizer, token_id) for token_id in answer]


def token_ids(kind: str, text: str) -> list[int]:
    """A text as tokens; where the tokenizer has bytes for it, as bytes."""
    if kind == "byte-level":
        return tokenizer_of(kind).encode(text).ids
    return list(text.encode())


TEXTS = st.text(st.sampled_from("ab .\néä語語語😀😀🧩"), max_size=90)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@given(before=TEXTS, after=TEXTS, cut=st.integers(0, 3))
def test_answer_reads_from_the_tail_of_a_prompt_as_from_all_of_it(
    kind: str, before: str, after: str, cut: int
) -> None:
    tokenizer = tokenizer_of(kind)
    # The prompt may end within a character, which the answer goes on with.
    whole = token_ids(kind, before * 3 + after)
    at = min(len(whole), len(token_ids(kind, before * 3)) + cut)
    prompt, answer = whole[:at], whole[at:]
    tail = list(tail_of(prompt, tokenizer, skip_special_tokens=True))
    if tokenizer.decode(prompt).endswith("\N{REPLACEMENT CHARACTER}"):
        assert tail == []
    else:
        assert text_after(tokenizer, tail, answer) == text_after(tokenizer, prompt, answer)


def test_tail_of_a_long_prompt_is_short() -> None:
    tokenizer = tokenizer_of("byte-level")
    prompt = tokenizer.encode("a chip and a host " * 1000).ids
    assert len(tail_of(prompt, tokenizer, skip_special_tokens=True)) == 64


def test_row_of_bytes_is_not_divided() -> None:
    tokenizer = tokenizer_of("byte-fallback")
    prompt = [*[WORDS.index("chip") + 256] * 100, *"語".encode() * 40]
    tail = tail_of(prompt, tokenizer, skip_special_tokens=True)
    assert (tail[0], len(tail)) == (prompt[0], 121)
