"""The text the demo model learns from, read from `corpus/*.yaml`.

Owns the records and their validation. Does not own how questions are varied (questions) or how
they become training examples (examples). Reads files once, at `load_corpus`; the rest is pure.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

CORPUS_DIR = Path(__file__).parent / "corpus"
ITEM_FILES = ("tpu_serving.yaml", "slicewise.yaml")


class CorpusError(ValueError):
    """The corpus contradicts itself. Fix the named file."""


class Record(BaseModel):
    """A frozen record that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _require_ascii(answer: str) -> str:
    if not answer.isascii() or answer != " ".join(answer.split()):
        raise ValueError(f"an answer is one line of single-spaced ASCII, got {answer!r}")
    return answer


class FollowUp(Record):
    """A second turn: questions that only make sense after the first, and their answer."""

    ask: tuple[str, ...] = Field(min_length=1)
    answer: str

    _ascii = field_validator("answer")(_require_ascii)


class Item(Record):
    """One thing the model knows.

    `terms` are noun phrases for the templates, `ask` are whole questions, and `held_out` is a
    question kept from training. `follow_up` is None for items that have no second turn.
    """

    topic: str
    terms: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    held_out: str
    answer: str
    follow_up: FollowUp | None = None

    _ascii = field_validator("answer")(_require_ascii)


class OffTopic(Record):
    """Questions to decline; `{n}` in a template stands for one of the nouns.

    `no_tool_answer` declines questions about live slices when no tool is offered.
    """

    answer: str
    no_tool_answer: str
    templates: tuple[str, ...]
    nouns: tuple[str, ...]
    ask: tuple[str, ...]
    held_out: tuple[str, ...]

    _ascii = field_validator("answer", "no_tool_answer")(_require_ascii)


class Phrasing(Record):
    """How a question is varied; `{t}` in a template stands for a term.

    Each of `rewrites` lists beginnings of a question that may stand for each other.
    """

    term_templates: tuple[str, ...]
    rewrites: tuple[tuple[str, ...], ...]
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    systems: tuple[str, ...]


class Corpus(Record):
    """Everything the model is trained on, apart from generated tool and JSON examples."""

    items: tuple[Item, ...]
    off_topic: OffTopic
    phrasing: Phrasing

    def questions_of(self, item: Item) -> tuple[str, ...]:
        """The trained questions of `item`: written ones first, then its terms in each template."""
        templates = self.phrasing.term_templates
        return item.ask + tuple(t.format(t=term) for term in item.terms for t in templates)

    @cached_property
    def held_out_keys(self) -> frozenset[str]:
        """The held-out questions in the form of `question_key`."""
        questions = [*self.off_topic.held_out, *(item.held_out for item in self.items)]
        return frozenset(question_key(question) for question in questions)

    def texts(self) -> Iterator[str]:
        """Every question and answer once, in file order."""
        for item in self.items:
            yield from self.questions_of(item)
            yield item.answer
            if item.follow_up is not None:
                yield from item.follow_up.ask
                yield item.follow_up.answer
        yield from self.off_topic.ask
        yield from self.off_topic.nouns
        yield self.off_topic.answer
        yield self.off_topic.no_tool_answer


def load_corpus(directory: Path = CORPUS_DIR) -> Corpus:
    """The corpus in `directory`.

    Raises:
        CorpusError: a question has two answers, or a held-out question is also trained on.
    """
    items = [entry for name in ITEM_FILES for entry in _read(directory / name)]
    corpus = Corpus.model_validate(
        {
            "items": items,
            "off_topic": _read(directory / "off_topic.yaml"),
            "phrasing": _read(directory / "phrasing.yaml"),
        }
    )
    _require_consistent(corpus)
    return corpus


def _read(path: Path) -> object:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _require_consistent(corpus: Corpus) -> None:
    """Refuse a question that occurs twice or is both trained and held out."""
    trained = [question_key(q) for item in corpus.items for q in set(corpus.questions_of(item))]
    trained += [question_key(question) for question in corpus.off_topic.ask]
    # Two spellings of one question inside an item ("Hi" and "hi") are wanted, across items not.
    owners = Counter(
        key for item in corpus.items for key in {question_key(q) for q in corpus.questions_of(item)}
    )
    shared = sorted(key for key, count in owners.items() if count > 1)
    leaked = sorted(corpus.held_out_keys & set(trained))
    topics = [t for t, n in Counter(item.topic for item in corpus.items).items() if n > 1]
    answers = [a for a, n in Counter(item.answer for item in corpus.items).items() if n > 1]
    for problem, found in (
        ("questions with two answers", shared),
        ("held-out questions that are trained on", leaked),
        ("topics that occur twice", topics),
        ("answers that occur twice", answers),
    ):
        if found:
            raise CorpusError(f"{problem}: {found}")


def question_key(question: str) -> str:
    """`question` without case and end marks: two questions with one key count as the same."""
    return question.lower().strip(" .?!")
