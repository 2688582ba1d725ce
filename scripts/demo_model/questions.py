"""Variations of a question: openers, closers, case, punctuation, small typing errors.

Pure: chance is an argument.
"""

import random

from scripts.demo_model.corpus import Corpus, question_key

# Shares of questions that get each change. Chosen so that about a third stay as written.
REWRITE_SHARE = 0.3
OPENER_SHARE = 0.12
CLOSER_SHARE = 0.06
LOWER_SHARE = 0.22
UNPUNCTUATED_SHARE = 0.2
TYPO_SHARE = 0.08


def vary(question: str, corpus: Corpus, rng: random.Random) -> str:
    """`question` as some user might type it, but never a held-out question."""
    phrasing = corpus.phrasing
    text = question
    if rng.random() < REWRITE_SHARE:
        rewritten = _rewrite(text, phrasing.rewrites, rng)
        text = text if question_key(rewritten) in corpus.held_out_keys else rewritten
    if rng.random() < TYPO_SHARE:
        text = _mistype(text, rng)
    if rng.random() < UNPUNCTUATED_SHARE:
        text = text.rstrip(".?!")
    if rng.random() < OPENER_SHARE:
        text = rng.choice(phrasing.openers) + _lower_first(text)
    if rng.random() < CLOSER_SHARE:
        text = text + rng.choice(phrasing.closers)
    if rng.random() < LOWER_SHARE:
        text = text.lower()
    return text


def _rewrite(text: str, rewrites: tuple[tuple[str, ...], ...], rng: random.Random) -> str:
    """`text` with its beginning exchanged, if it has one that may be."""
    for beginnings in rewrites:
        for beginning in beginnings:
            if text.startswith(beginning):
                return rng.choice(beginnings) + text.removeprefix(beginning)
    return text


def _lower_first(text: str) -> str:
    """Lower the first letter of an ordinary word, not of an acronym or of "I"."""
    first_word = text.split(" ", 1)[0]
    is_ordinary = first_word[1:].islower() and len(first_word) > 1
    return text[0].lower() + text[1:] if is_ordinary else text


def _mistype(text: str, rng: random.Random) -> str:
    """Swap, drop or double one character of a text of at least five."""
    if len(text) < 5:
        return text
    at = rng.randrange(1, len(text) - 2)
    kind = rng.choice(("swap", "drop", "double"))
    if kind == "swap":
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    if kind == "drop":
        return text[:at] + text[at + 1 :]
    return text[:at] + text[at] + text[at:]
