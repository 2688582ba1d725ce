"""What a paced engine emits is text for the shipped model's tokenizer, one letter per token."""

from pathlib import Path

from tokenizers import Tokenizer

from serving.domain.tokens.paced import LETTERS

MODEL = Path(__file__).parents[2] / "models" / "slicewise-demo"


def test_tokens_are_the_letters_of_the_shipped_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    letters = [tokenizer.decode([token_id]) for token_id in range(*LETTERS)]
    assert "".join(letters) == "abcdefghijklmnopqrstuvwxyz"
