"""Prompts: exact lengths as ids and as texts, equal blocks equal tokens, real tokenizers."""

from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from loadtest.errors import LoadTestError
from loadtest.planned_request import PromptBlock
from loadtest.workload.discovery import discover_vocabulary
from loadtest.workload.prompts import (
    Vocabulary,
    first_tokens,
    prompt_text,
    prompt_token_ids,
    template_overhead,
    within_template,
)

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "models/slicewise-demo"
BLOCKS = (PromptBlock("a", 511), PromptBlock("b", 1), PromptBlock("c", 1000))

block_lists = st.lists(
    st.builds(PromptBlock, st.sampled_from("abcd"), st.integers(1, 40)), min_size=1, max_size=5
)


class Served:
    """A tokenizer as a server shows it: texts to ids and back, no special tokens; calls counted."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_calls = 0

    def tokenize(self, text: str) -> list[int]:
        self.num_calls += 1
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def detokenize(self, ids: list[int]) -> str:
        self.num_calls += 1
        assert max(ids) < self._tokenizer.get_vocab_size(), "a server refuses ids that do not exist"
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def demo() -> Served:
    return Served(Tokenizer.from_file(str(DEMO / "tokenizer.json")))


def text_to_train_on() -> list[str]:
    return [path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))]


def byte_level() -> Served:
    """As GPT-2's and its successors': a space belongs to the word after it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text_to_train_on(), trainer)
    return Served(tokenizer)


def metaspace() -> Served:
    """As SentencePiece's: the first word gets a space as well."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(text_to_train_on(), trainer)
    return Served(tokenizer)


@pytest.fixture(
    scope="module", params=[demo, byte_level, metaspace], ids=lambda made: made.__name__
)
def served(request: pytest.FixtureRequest) -> Served:
    return request.param()


def test_texts_have_exactly_as_many_tokens_as_their_blocks_say(served: Served) -> None:
    vocabulary = discover_vocabulary(served.tokenize, served.detokenize)

    @given(block_lists)
    def holds(blocks: list[PromptBlock]) -> None:
        text = prompt_text(blocks, vocabulary)
        assert len(served.tokenize(text)) == sum(block.num_tokens for block in blocks)

    holds()
    assert len(served.tokenize(prompt_text(BLOCKS, vocabulary))) == 1512


def test_words_are_their_ids_wherever_they_stand(served: Served) -> None:
    vocabulary = discover_vocabulary(served.tokenize, served.detokenize)
    by_word = dict(zip(vocabulary.words, vocabulary.token_ids, strict=True))

    opener, *words = prompt_text(BLOCKS, vocabulary).split()
    assert opener in vocabulary.openers
    assert served.tokenize(" ".join([opener, *words]))[1:] == [by_word[word] for word in words]


def test_a_vocabulary_is_found_in_some_hundred_calls() -> None:
    served = demo()
    vocabulary = discover_vocabulary(served.tokenize, served.detokenize)

    assert served.num_calls < 500
    assert len(vocabulary.words) > 200


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def pairs(text: str) -> list[int]:
    """One token for two words: no word's own."""
    words = text.split()
    return [sum(map(ord, "".join(words[at : at + 2]))) for at in range(0, len(words), 2)]


def hasty(text: str) -> list[int]:
    """Forgets what a word is once it stands after a longer one."""
    words = text.split()
    return [
        sum(letters(word)) * 1000 + len(word) + 50 * (len(before) > len(word) and before != "the")
        for before, word in zip(["", *words], words, strict=False)
    ]


@pytest.mark.parametrize(
    ("tokenize", "problem"),
    [
        (letters, "none of the shortest words is one token"),
        (pairs, "none of the shortest words is one token"),
        (hasty, "depend on their neighbours"),
    ],
)
def test_a_tokenizer_without_words_is_refused(
    tokenize: Callable[[str], list[int]], problem: str
) -> None:
    with pytest.raises(LoadTestError, match=problem):
        discover_vocabulary(tokenize, lambda _: "")


def test_a_tokenizer_of_few_words_is_refused() -> None:
    known = {"the": 1, "a": 2, "of": 3}

    def tokenize(text: str) -> list[int]:
        return [
            token
            for word in text.split()
            for token in ([known[word]] if word in known else letters(word + word))
        ]

    with pytest.raises(LoadTestError, match=r"\d+ words of one token, \d+ of them .*; allowed"):
        discover_vocabulary(tokenize, lambda _: "")


def test_the_chat_template_is_fitted_into_the_length() -> None:
    served = demo()
    template = jinja2.Environment().from_string((DEMO / "chat_template.jinja").read_text())

    def tokenize_messages(messages: list[dict[str, str]]) -> list[int]:
        return served.tokenize(template.render(messages=messages, add_generation_prompt=True))

    vocabulary = discover_vocabulary(served.tokenize, served.detokenize)
    overhead_tokens = template_overhead(tokenize_messages, vocabulary)

    def templated(blocks: tuple[PromptBlock, ...]) -> int:
        text = prompt_text(within_template(blocks, overhead_tokens), vocabulary)
        return len(tokenize_messages([{"role": "user", "content": text}]))

    assert overhead_tokens == 12
    assert templated(BLOCKS) == 1512
    # The last blocks are shorter than what the template adds.
    assert templated((PromptBlock("a", 40), PromptBlock("b", 3), PromptBlock("c", 2))) == 45
    assert templated((PromptBlock("a", 13),)) == 13
    # No prompt is shorter than that.
    assert templated((PromptBlock("a", 5),)) == 13


def test_a_template_that_adds_now_more_now_less_is_refused() -> None:
    served = demo()
    vocabulary = discover_vocabulary(served.tokenize, served.detokenize)

    def tokenize_messages(messages: list[dict[str, str]]) -> list[int]:
        return served.tokenize(messages[0]["content"] * 2)

    with pytest.raises(LoadTestError, match=r"adds .* tokens; allowed: the same for every length"):
        template_overhead(tokenize_messages, vocabulary)


@given(block_lists)
def test_ids_have_exactly_the_length_and_the_range(blocks: list[PromptBlock]) -> None:
    ids = prompt_token_ids(blocks, Vocabulary(range(100, 165)))

    assert len(ids) == sum(block.num_tokens for block in blocks)
    assert all(type(token) is int and 100 <= token <= 164 for token in ids)


@given(st.text(min_size=1), st.integers(1, 50), st.integers(0, 50))
def test_a_longer_block_of_the_same_content_begins_with_the_shorter(
    content_id: str, num_tokens: int, more: int
) -> None:
    vocabulary = Vocabulary(range(30), tuple("abcdefghi"), tuple("xyz"))
    short = [PromptBlock(content_id, num_tokens)]
    long = [PromptBlock(content_id, num_tokens + more)]

    assert prompt_token_ids(long, vocabulary)[:num_tokens] == prompt_token_ids(short, vocabulary)
    assert prompt_text(long, vocabulary).startswith(prompt_text(short, vocabulary))


def test_blocks_of_other_content_have_other_tokens() -> None:
    vocabulary = Vocabulary(range(50_001))
    found = {
        tuple(prompt_token_ids([PromptBlock(f"h{number}", 8)], vocabulary)) for number in range(500)
    }

    assert len(found) == 500


def test_the_tokens_of_a_block_never_change() -> None:
    # A stored run of known answers would be worthless if they did.
    ids = prompt_token_ids([PromptBlock("h7", 6)], Vocabulary(range(1000, 2000)))

    assert ids == [1238, 1137, 1584, 1086, 1658, 1777]


def test_text_without_words_is_refused() -> None:
    with pytest.raises(LoadTestError, match="without words"):
        prompt_text(BLOCKS, Vocabulary(range(1, 10)))


@given(block_lists, st.integers(0, 250))
def test_the_first_tokens_of_blocks_are_those_of_the_prompt(
    blocks: list[PromptBlock], num_tokens: int
) -> None:
    vocabulary = Vocabulary(range(10_000))
    cut = first_tokens(blocks, num_tokens)

    assert prompt_token_ids(cut, vocabulary) == prompt_token_ids(blocks, vocabulary)[:num_tokens]
