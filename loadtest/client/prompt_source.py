"""Finds the material of prompts for each model of a run, once for every worker.

Asks the server's `/tokenize` and `/detokenize`, where there are any, so that prompts have exactly
the lengths that were planned. Owns the asking and the file; how words are found is `discovery`'s.
"""

import json
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from loadtest.errors import LoadTestError
from loadtest.planned_request import PromptBlock
from loadtest.workload.discovery import discover_vocabulary
from loadtest.workload.prompts import (
    Vocabulary,
    prompt_text,
    prompt_token_ids,
    template_overhead,
    within_template,
)

_TIMEOUT_S = 10.0
# Without /tokenize: words that nearly every tokenizer has as one token, and ids that every
# vocabulary of a thousand tokens has. `usage` then shows how far a prompt is off.
# fmt: off
_LIKELY_WORDS = (
    "time", "year", "way", "day", "man", "world", "life", "hand", "part", "child", "eye", "woman",
    "place", "work", "week", "case", "point", "company", "number", "group", "problem", "fact",
)
# fmt: on
_LIKELY_IDS = (256, 999)


class ModelPrompts(BaseModel):
    """The material of one model's prompts.

    `is_exact` is true if the server's tokenizer was asked. `template_tokens` are what a chat
    template adds to a message, 0 where that is not known.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    is_exact: bool
    token_ids: tuple[int, ...]
    words: tuple[str, ...]
    openers: tuple[str, ...]
    template_tokens: int


class PromptFile(BaseModel):
    """The file by which a run hands the material to its workers; by model."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    models: dict[str, ModelPrompts]


@dataclass(frozen=True, slots=True)
class ServerPrompts:
    """Makes the prompts of a run's models."""

    vocabularies: dict[str, Vocabulary]
    template_tokens: dict[str, int]

    @classmethod
    def of(cls, file: PromptFile) -> "ServerPrompts":
        """Builds prompts from what was found out."""
        return cls(
            {
                name: Vocabulary(model.token_ids, model.words, model.openers)
                for name, model in file.models.items()
            },
            {name: model.template_tokens for name, model in file.models.items()},
        )

    def token_ids(self, model: str, blocks: Sequence[PromptBlock]) -> list[int]:
        """Returns exactly the blocks' tokens."""
        return prompt_token_ids(blocks, self.vocabularies[model])

    def chat_text(self, model: str, blocks: Sequence[PromptBlock]) -> str:
        """Returns a user's message of the blocks' tokens, including what the chat template adds."""
        fitted = within_template(blocks, self.template_tokens[model])
        return prompt_text(fitted, self.vocabularies[model])


def find_prompts(url: str, models: Iterable[str], api_key: str | None) -> PromptFile:
    """Asks the server about each model's tokenizer; what it cannot answer is guessed."""
    return PromptFile(
        models={model: _model_prompts(_Tokenizer(url, model, api_key)) for model in models}
    )


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """The server's tokenizer of one model; its methods raise LoadTestError if it has none."""

    url: str
    model: str
    api_key: str | None

    def tokenize(self, text: str) -> list[int]:
        return self._tokens({"prompt": text, "add_special_tokens": False})

    def tokenize_messages(self, messages: list[dict[str, str]]) -> list[int]:
        return self._tokens({"messages": messages, "add_generation_prompt": True})

    def detokenize(self, token_ids: list[int]) -> str:
        text = self._post("/detokenize", {"tokens": token_ids}).get("prompt")
        if not isinstance(text, str):
            raise LoadTestError(f"{self.url}/detokenize answers without a prompt")
        return text

    def _tokens(self, body: dict[str, object]) -> list[int]:
        tokens = self._post("/tokenize", body).get("tokens")
        if not isinstance(tokens, list):
            raise LoadTestError(f"{self.url}/tokenize answers without tokens")
        return [int(token) for token in tokens]

    def _post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        headers = {"content-type": "application/json"}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        data = json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                answer = json.load(response)
        except (OSError, ValueError) as error:
            raise LoadTestError(f"{self.url}{path}: {error}") from error
        if not isinstance(answer, dict):
            raise LoadTestError(f"{self.url}{path} answers no object")
        return answer


def _model_prompts(tokenizer: _Tokenizer) -> ModelPrompts:
    try:
        vocabulary = discover_vocabulary(tokenizer.tokenize, tokenizer.detokenize)
    except LoadTestError:
        low, high = _LIKELY_IDS
        vocabulary = Vocabulary(range(low, high + 1), _LIKELY_WORDS, _LIKELY_WORDS)
        is_exact = False
    else:
        is_exact = True
    return ModelPrompts(
        is_exact=is_exact,
        token_ids=tuple(vocabulary.token_ids),
        words=vocabulary.words,
        openers=vocabulary.openers,
        template_tokens=_template_tokens(tokenizer, vocabulary) if is_exact else 0,
    )


def _template_tokens(tokenizer: _Tokenizer, vocabulary: Vocabulary) -> int:
    """Returns the tokens that a chat template adds; 0 for a model without one."""
    try:
        return template_overhead(tokenizer.tokenize_messages, vocabulary)
    except LoadTestError:
        return 0
