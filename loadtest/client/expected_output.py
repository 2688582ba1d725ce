"""Checks an answer against the known one: from a formula, or from a pass without disturbance.

Owns what the right answer to a request is. Does not own how two answers are compared
(`answer_diff`) nor how tokens come out of a response (the client).
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadtest.client.answer_diff import diff_answers
from loadtest.errors import LoadTestError
from loadtest.planned_request import PlannedRequest
from serving.domain.tokens.paced import LETTERS, paced_tokens


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """The tokens of one answer that are missing, came twice, or belong elsewhere."""

    lost: int
    repeated: int
    foreign: int


RIGHT = AnswerCheck(0, 0, 0)


# Takes the tokens of a prompt and of its whole answer; `None` if the right one is not known.
CheckAnswer = Callable[[Sequence[int], Sequence[int], PlannedRequest], AnswerCheck | None]


def compare(expected: Sequence[int], received: Sequence[int]) -> AnswerCheck:
    """Counts what is wrong with `received`; the definitions are those of `answer_diff`."""
    if len(expected) == len(received) and list(expected) == list(received):
        return RIGHT
    found = list(diff_answers(expected, received))
    return AnswerCheck(
        sum(difference.lost for difference in found),
        sum(difference.repeated for difference in found),
        sum(difference.foreign for difference in found),
    )


def check_paced(
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    planned_request: PlannedRequest,
) -> AnswerCheck:
    """Compares with the formula of paced engines, which knows every answer at any pace."""
    expected = paced_tokens(prompt_token_ids, planned_request.output_tokens, LETTERS)
    return compare(expected, output_token_ids)


class _RecordedLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str
    tokens: list[int]


class RecordedAnswers:
    """The answers of an undisturbed greedy pass, by model and prompt.

    The first answer to a prompt stands; a shorter request is answered by its beginning.
    """

    def __init__(self) -> None:
        self._answers: dict[str, list[int]] = {}

    def __len__(self) -> int:
        """Returns the number of prompts with a known answer."""
        return len(self._answers)

    def record(
        self,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        planned_request: PlannedRequest,
    ) -> None:
        """Remembers an answer, unless one to this prompt is known."""
        key = _key(prompt_token_ids, planned_request.model)
        self._answers.setdefault(key, list(output_token_ids))

    def check(
        self,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        planned_request: PlannedRequest,
    ) -> AnswerCheck | None:
        """Compares with the recorded answer; `None` without one, or if it is too short."""
        known = self._answers.get(_key(prompt_token_ids, planned_request.model))
        if known is None or len(known) < planned_request.output_tokens:
            return None
        return compare(known[: planned_request.output_tokens], output_token_ids)

    def save(self, path: Path) -> None:
        """Writes one line of JSON for each prompt."""
        lines = (
            msgspec.json.encode(_RecordedLine(key, known)) for key, known in self._answers.items()
        )
        path.write_bytes(b"".join(line + b"\n" for line in lines))

    @classmethod
    def load(cls, path: Path) -> "RecordedAnswers":
        """Returns what `save` wrote.

        Raises:
            LoadTestError: the file cannot be read, or a line of it; record the answers anew.
        """
        answers = cls()
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise LoadTestError(f"answers {path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                parsed = msgspec.json.decode(line, type=_RecordedLine)
            except msgspec.DecodeError as error:
                raise LoadTestError(f"answers {path}, line {number}: {error}") from error
            answers._answers.setdefault(parsed.prompt, parsed.tokens)
        return answers


def _key(prompt_token_ids: Sequence[int], model: str) -> str:
    digest = hashlib.blake2b(model.encode() + b"\0", digest_size=16)
    digest.update(array("q", prompt_token_ids).tobytes())
    return digest.hexdigest()
