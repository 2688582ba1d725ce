"""Discovers words of one token each for a server that only answers questions on its tokenizer.

Owns the questions and the proof. The tokenizer comes as two functions, which may do I/O; a handful
of calls finds the words, and some hundred more those that may begin a text.
"""

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from loadtest.errors import LoadTestError
from loadtest.workload.prompts import Vocabulary

Tokenize = Callable[[str], list[int]]
Detokenize = Callable[[list[int]], str]

# Enough that prompts of any length differ, and few enough to be asked about in a few calls.
_MAX_WORDS = 4096
# A prompt begins with one of these; each costs a call.
_MAX_OPENERS = 64
_MAX_OPENERS_TRIED = 400
# With fewer, prompts that should differ would share their beginnings.
_MIN_WORDS, _MIN_OPENERS = 16, 4
_IDS_AT_ONCE = 512
_WORDS_AT_ONCE = 512
# Each pass drops what failed; a tokenizer that still disagrees reads beyond a word.
_MAX_PROOFS = 4

# Short, frequent words: most tokenizers of text have most of them as one token.
_FREQUENT = """
a about after all also an and any are as at be because been before between both but by can could day
did do does down each even find first for from get give go good great had has have he her here him
his how i if in into is it its just know large last less like line long look made make many may me
men more most much must my name new no not now number of off old on one only or other our out over
own part people place right s said same say see set she should small so some still such system t
take than that the their them then there these they thing this those three time to too two under up
us use very was water way we well were what when where which while who will with word work world
would year you your b c d e f g h j k l m n o p r u v w x y
""".split()  # noqa: SIM905, a list of 200 literals would fill the page


def discover_vocabulary(tokenize: Tokenize, detokenize: Detokenize) -> Vocabulary:
    """Returns words that stay one token each in any order, as far as the tokenizer shows them.

    `tokenize` adds no special tokens. `token_ids` are the words' ids after a space.

    Raises:
        LoadTestError: it knows too few such words.
    """
    separator = _separator(tokenize)
    found = _single_tokens(_FREQUENT, separator, tokenize)
    if found:
        # Ids run from 0: all up to the greatest found exist. The words of most vocabularies are
        # spread over all of it.
        candidates = _words_of_ids(range(max(found.values()) + 1), detokenize)
        known = found.keys()
        found |= _single_tokens([w for w in candidates if w not in known], separator, tokenize)
    words = _proven(dict(islice(found.items(), _MAX_WORDS)), separator, tokenize)
    openers = _openers(words, tokenize)
    if len(words) < _MIN_WORDS or len(openers) < _MIN_OPENERS:
        raise LoadTestError(
            f"the tokenizer has {len(words)} words of one token, {len(openers)} of them at a "
            f"text's beginning; allowed: at least {_MIN_WORDS} and {_MIN_OPENERS}"
        )
    return Vocabulary(tuple(words.values()), tuple(words), openers)


@dataclass(frozen=True, slots=True)
class _Separator:
    """The word that is one token after a space, and the tokens it is at a text's beginning."""

    word: str
    token: int
    opening: list[int]


def _separator(tokenize: Tokenize) -> _Separator:
    for word in ("the", "a", "of", "and", "to", "is", "in", "x"):
        opening = tokenize(word)
        tail = tokenize(" ".join([word] * 4))[len(opening) :]
        if len(tail) == 3 and len(set(tail)) == 1 and tail[0] not in opening[1:]:
            return _Separator(word, tail[0], opening)
    raise LoadTestError("none of the shortest words is one token after a space; allowed: one")


def _single_tokens(
    words: Sequence[str], separator: _Separator, tokenize: Tokenize
) -> dict[str, int]:
    """Returns those of the words that are one token between two separators, with their ids."""
    found: dict[str, int] = {}
    for start in range(0, len(words), _WORDS_AT_ONCE):
        found |= _between(words[start : start + _WORDS_AT_ONCE], separator, tokenize)
    return found


def _between(words: Sequence[str], separator: _Separator, tokenize: Tokenize) -> dict[str, int]:
    text = "".join(f"{separator.word} {word} " for word in words) + separator.word
    tokens = tokenize(text)[len(separator.opening) :]
    segments: list[list[int]] = [[]]
    for token in tokens:
        if token == separator.token:
            segments.append([])
        else:
            segments[-1].append(token)
    if len(segments) == len(words) + 1 and not segments[-1]:
        pairs = zip(words, segments, strict=False)
        return {word: segment[0] for word, segment in pairs if len(segment) == 1}
    # A word that contains the separator spoils its batch, so the halves are tried.
    if len(words) == 1:
        return {}
    middle = len(words) // 2
    return _between(words[:middle], separator, tokenize) | _between(
        words[middle:], separator, tokenize
    )


def _words_of_ids(ids: Sequence[int], detokenize: Detokenize) -> list[str]:
    """Returns words in the ids' texts, each once; spread over the ids where there are many.

    They are guesses, as neighbours run together.
    """
    stride = max(1, len(ids) // (4 * _MAX_WORDS))
    chosen = list(ids[::stride])
    chunks = (chosen[at : at + _IDS_AT_ONCE] for at in range(0, len(chosen), _IDS_AT_ONCE))
    words: Iterable[str] = (
        word for chunk in chunks for word in re.findall(r"(?<= )[a-z]{1,12}\b", detokenize(chunk))
    )
    return list(dict.fromkeys(words))


def _proven(words: dict[str, int], separator: _Separator, tokenize: Tokenize) -> dict[str, int]:
    """The words that are still one token each in a text of all of them, in a random order."""
    for seed in range(_MAX_PROOFS):
        order = sorted(words)
        random.Random(seed).shuffle(order)
        if _agrees(order, words, separator, tokenize):
            return words
        kept = _agreeing(order, words, separator, tokenize)
        words = {word: token for word, token in words.items() if word in kept}
    raise LoadTestError(
        "the tokens of words depend on their neighbours; allowed: words that do not"
    )


def _agreeing(
    order: Sequence[str], ids: Mapping[str, int], separator: _Separator, tokenize: Tokenize
) -> set[str]:
    """Returns the words that agree in texts of a half, a quarter and so on, down to one word."""
    if _agrees(order, ids, separator, tokenize):
        return set(order)
    if len(order) <= 1:
        return set()
    middle = len(order) // 2
    return _agreeing(order[:middle], ids, separator, tokenize) | _agreeing(
        order[middle:], ids, separator, tokenize
    )


def _agrees(
    order: Sequence[str], ids: Mapping[str, int], separator: _Separator, tokenize: Tokenize
) -> bool:
    wanted = [*separator.opening, *(ids[word] for word in order)]
    return tokenize(" ".join([separator.word, *order])) == wanted


def _openers(words: Iterable[str], tokenize: Tokenize) -> tuple[str, ...]:
    tried = islice(words, _MAX_OPENERS_TRIED)
    return tuple(islice((word for word in tried if len(tokenize(word)) == 1), _MAX_OPENERS))
