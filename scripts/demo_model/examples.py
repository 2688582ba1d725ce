"""Training examples: a rendered conversation and the reply to learn.

Owns the mixture: which kinds of example there are and how often each is drawn. Does not own
tokens or batches (batches). Pure: chance is an argument.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.demo_model.corpus import Corpus, Item
from scripts.demo_model.json_docs import draw_json_case
from scripts.demo_model.questions import vary
from scripts.demo_model.tools import (
    ToolCase,
    draw_case,
    draw_value,
    list_slices_case,
    offer,
    slice_status_case,
    weather_case,
)

Message = dict[str, object]

SYSTEM_SHARE = 0.35
THINKING_SHARE = 0.15
# Where a term or a written question is equally good, written ones are the more natural.
WRITTEN_SHARE = 0.6
# Before the question of a long message: enough to teach the habit, at about 25 tokens each.
MAX_FILLER_SENTENCES = 12
FALLBACK_THOUGHT = "This is not about Slicewise or TPU serving, so I have to decline."


@dataclass(frozen=True, slots=True)
class Example:
    """One reply to learn.

    With no `messages` the reply is plain text for the completions endpoint, learnt as a whole.
    `thought` is None when thinking is off.
    """

    messages: tuple[Message, ...]
    reply: str
    thought: str | None = None
    tools: list[dict[str, object]] = field(default_factory=list)


def thought_about(topic: str) -> str:
    """What the model thinks before it answers a question about `topic`."""
    return f"The question is about {topic}. I know this, so I can answer it briefly."


class Mixture:
    """Draws examples of every kind from one corpus and one source of chance."""

    def __init__(self, corpus: Corpus, rng: random.Random) -> None:
        self._corpus = corpus
        self._rng = rng
        self._items_with_follow_up = [i for i in corpus.items if i.follow_up is not None]
        self._kinds: dict[Callable[[], Example], int] = {
            self._answer: 49,
            self._long_question: 3,
            self._off_topic: 12,
            self._later_turn: 6,
            self._follow_up: 4,
            self._tool_call: 7,
            self._tool_result: 6,
            self._tools_not_needed: 3,
            self._no_tool: 1,
            self._json: 3,
            self._repeat: 4,
            self._plain_text: 3,
        }

    def draw(self, count: int) -> list[Example]:
        """`count` independent examples."""
        kinds = self._rng.choices(list(self._kinds), list(self._kinds.values()), k=count)
        return [kind() for kind in kinds]

    def _question(self, item: Item) -> str:
        written = [*item.ask]
        templated = self._corpus.questions_of(item)[len(written) :]
        use_written = not templated or (written and self._rng.random() < WRITTEN_SHARE)
        question = self._rng.choice(written if use_written else templated)
        return vary(question, self._corpus, self._rng)

    def _off_topic_question(self) -> str:
        off_topic = self._corpus.off_topic
        roll = self._rng.random()
        if roll < 0.4:
            question = self._rng.choice(off_topic.ask)
        elif roll < 0.92:
            noun = self._rng.choice(off_topic.nouns)
            question = self._rng.choice(off_topic.templates).format(n=noun)
        else:
            make = self._rng.choice((weather_case, draw_case))
            question = make(self._rng).question
            if "slice" in question.lower() or "-" in question:
                question = weather_case(self._rng).question
        return vary(question, self._corpus, self._rng)

    def _system(self) -> list[Message]:
        if self._rng.random() >= SYSTEM_SHARE:
            return []
        content = self._rng.choice(self._corpus.phrasing.systems)
        return [{"role": "system", "content": content}]

    def _thought(self, thought: str) -> str | None:
        return thought if self._rng.random() < THINKING_SHARE else None

    def _answer(self) -> Example:
        item = self._rng.choice(self._corpus.items)
        messages = (*self._system(), _user(self._question(item)))
        return Example(messages, item.answer, self._thought(thought_about(item.topic)))

    def _long_question(self) -> Example:
        """A question at the end of a long message; what stands before it does not matter."""
        plain = self._off_topic() if self._rng.random() < 0.15 else self._answer()
        sentences = [*self._corpus.off_topic.ask, *(i.answer for i in self._corpus.items)]
        filler = self._rng.choices(sentences, k=self._rng.randrange(1, 5))
        repeats = self._rng.choice((1, 1, 2, 4, 8))
        text = " ".join([*filler * repeats][:MAX_FILLER_SENTENCES])
        question = str(plain.messages[-1]["content"])
        messages = (*plain.messages[:-1], _user(f"{text} {question}"))
        return Example(messages, plain.reply, plain.thought)

    def _off_topic(self) -> Example:
        messages = (*self._system(), _user(self._off_topic_question()))
        return Example(messages, self._corpus.off_topic.answer, self._thought(FALLBACK_THOUGHT))

    def _later_turn(self) -> Example:
        """A question after one to three unrelated turns."""
        history = self._system()
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            if self._rng.random() < 0.2:
                question, answer = self._off_topic_question(), self._corpus.off_topic.answer
            else:
                item = self._rng.choice(self._corpus.items)
                question, answer = self._question(item), item.answer
            history += [_user(question), _assistant(answer)]
        last = self._off_topic() if self._rng.random() < 0.12 else self._answer()
        return Example((*history, last.messages[-1]), last.reply, last.thought)

    def _follow_up(self) -> Example:
        item = self._rng.choice(self._items_with_follow_up)
        assert item.follow_up is not None  # the list holds no other items
        question = vary(self._rng.choice(item.follow_up.ask), self._corpus, self._rng)
        first = [_user(self._question(item)), _assistant(item.answer)]
        messages = (*self._system(), *first, _user(question))
        return Example(messages, item.follow_up.answer, self._thought(thought_about(item.topic)))

    def _tool_turn(self, case: ToolCase) -> Message:
        question = case.question.lower() if self._rng.random() < 0.08 else case.question
        if self._rng.random() < 0.15:
            question = question.rstrip(".?")
        return _user(question)

    def _tool_call(self) -> Example:
        case = draw_case(self._rng)
        thought = self._thought(f"I need the tool {case.name} for this.")
        messages = (*self._system(), self._tool_turn(case))
        return Example(messages, case.call_text, thought, offer(case, self._rng))

    def _tool_result(self) -> Example:
        case = draw_case(self._rng)
        call = {"function": {"name": case.name, "arguments": case.arguments}}
        messages = (
            *self._system(),
            self._tool_turn(case),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": case.result},
        )
        thought = self._thought("The tool has answered, so I can reply.")
        return Example(messages, case.sentence, thought, offer(case, self._rng))

    def _tools_not_needed(self) -> Example:
        plain = self._off_topic() if self._rng.random() < 0.15 else self._answer()
        offered = offer(draw_case(self._rng), self._rng)
        return Example(plain.messages, plain.reply, plain.thought, offered)

    def _no_tool(self) -> Example:
        make = self._rng.choice((slice_status_case, list_slices_case))
        messages = (*self._system(), self._tool_turn(make(self._rng)))
        return Example(messages, self._corpus.off_topic.no_tool_answer)

    def _json(self) -> Example:
        question, document = draw_json_case(self._rng)
        return Example((*self._system(), _user(question)), document)

    def _repeat(self) -> Example:
        """Copying on request, which teaches what tool arguments need."""
        words = " ".join(draw_value(self._rng) for _ in range(self._rng.randrange(1, 6)))
        request = self._rng.choice(("Repeat after me: {}", "Say: {}", "Repeat: {}"))
        return Example((*self._system(), _user(request.format(words))), words)

    def _plain_text(self) -> Example:
        return Example((), self._rng.choice(self._corpus.items).answer)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
