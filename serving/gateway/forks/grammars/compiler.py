"""Compiles grammars that clients send, as an engine would: a task of a fork server."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
)
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from serving.gateway.forks.grammars.messages import CompileOutcome

# Tokens of an answer that are tried.
_NUM_TRIED = 16
_LONGEST_PROBLEM = 500  # characters
# What vLLM takes first where it may choose. An engine has one for all of its requests, so what only
# another one could keep would not be kept.
_CHOSEN = "xgrammar"


class CannotKeepError(Exception):
    """The grammar is no grammar, or not one that engines here keep. The message is a client's."""


class Compiler:
    """Does what an engine does with a grammar. Built once, used in forks."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._tokenizer = cached_tokenizer_from_config(config.model_config)
        self._backends: dict[str, StructuredOutputBackend] = {}
        self.backend(self.own_backend)

    @property
    def own_backend(self) -> str:
        """The one that engines use."""
        configured = str(self._config.structured_outputs_config.backend)
        return _CHOSEN if configured == "auto" else configured

    def backend(self, name: str) -> StructuredOutputBackend:
        """Returns vLLM's compiler of this name, the same each time."""
        if name not in self._backends:
            kinds = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend}
            if name not in kinds:
                raise CannotKeepError(f"structured outputs are not compiled by {name} here")
            self._backends[name] = kinds[name](
                self._config,
                tokenizer=self._tokenizer,
                vocab_size=self._config.model_config.get_vocab_size(),
            )
        return self._backends[name]

    @staticmethod
    def _try_out(backend: StructuredOutputBackend, grammar: StructuredOutputGrammar) -> None:
        """Writes the first tokens of an answer: what leads nowhere, or is slow, shows there."""
        allowed = backend.allocate_token_bitmask(1)
        for _ in range(_NUM_TRIED):
            if grammar.is_terminated():
                return
            grammar.fill_bitmask(allowed, 0)
            words = allowed[0].tolist()
            at = next((at for at, word in enumerate(words) if word), None)
            if at is None:
                raise CannotKeepError("no text fits it")
            # The lowest bit of the first word that has one.
            token_id = at * 32 + ((words[at] & -words[at]).bit_length() - 1)
            if not grammar.accept_tokens("", [token_id]):
                return

    def compile(self, grammar: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that an engine is sent.

        Raises:
            CannotKeepError: an engine would not keep this.
            ValueError: vLLM or its compiler refuses it.
        """
        asked = StructuredOutputsParams(**grammar)
        params = SamplingParams(structured_outputs=asked)
        params._validate_structured_outputs(
            self._config.model_config, self._config.structured_outputs_config, self._tokenizer
        )
        judged = params.structured_outputs
        assert judged is not None
        if judged._backend != self.own_backend:
            raise CannotKeepError(
                f"only {judged._backend} could keep this, and engines here use {self.own_backend}"
            )
        kind, text = get_structured_output_key(judged)
        backend = self.backend(self.own_backend)
        self._try_out(backend, backend.compile_grammar(kind, text))
        return {field.name: getattr(judged, field.name) for field in fields(judged)}

    def outcome_of(self, payload: bytes) -> bytes:
        """Does an order: `payload` holds the fields of a client's grammar, in JSON.

        Raises:
            MemoryError: it takes more than it may.
        """
        try:
            # By json, which reads integers of any size.
            outcome = CompileOutcome(fields=self.compile(json.loads(payload)))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 # whatever a compiler says of what it got
            problem = (str(error) or repr(error))[:_LONGEST_PROBLEM]
            outcome = CompileOutcome(problem.encode("ascii", "backslashreplace").decode())
        return msgspec.json.encode(outcome)
