"""Begins the text of an answer from the end of its prompt, however long the prompt is.

vLLM gives the whole prompt to the decoder of an answer's text, which decodes all of it at the first
token: 45 ms of the event loop for 190,000 tokens. The text of an answer depends on no more than the
prompt's last tokens. And where a prompt ends within a character, that decoder repeats all that it
was given as text of the answer: there it is given nothing. Works on vLLM's objects as they come.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tokenizers
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput

# Kept of a longer prompt, at least: what lies before cannot change how the next token reads.
_TAIL_TOKENS = 64
# A character has four bytes at most, and no token less than one.
_CHARACTER_TOKENS = 4
# Tokenizers with byte fallback write the bytes of one character as tokens of this form, and decode
# a row of them together: a row is not divided.
_BYTE_TOKEN = "<0x"
# What an unfinished character reads as.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TailOutputProcessor(OutputProcessor):
    """Does what vLLM's does; an output that it cannot read ends one request and not all."""

    def __init__(
        self, *args: Any, on_unreadable: Callable[[str, Exception], None], **kwargs: Any
    ) -> None:
        """Makes one that reports a request whose output cannot be read, and what was wrong."""
        super().__init__(*args, **kwargs)
        self._on_unreadable = on_unreadable

    def process_outputs(
        self, engine_core_outputs: Iterable[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> OutputProcessorOutput:
        """Does what vLLM's does with each output.

        vLLM lets all requests of all engines fail, and takes no more, when one output raises: for
        that an engine has to name one token that no tokenizer knows.
        """
        left = list(engine_core_outputs)
        ended: list[str] = []
        while True:
            feed = _Feed(left)
            try:
                done: OutputProcessorOutput = super().process_outputs(feed, *args, **kwargs)
            except Exception as error:
                if feed.present is None:
                    raise
                # What vLLM would have told of those before it: whose stop string was found.
                before, left = left[: feed.place], left[feed.place + 1 :]
                names = [each.request_id for each in before if not each.finished]
                ended += [name for name in names if name not in self.request_states]
                self._on_unreadable(feed.present.request_id, error)
            else:
                done.reqs_to_abort.extend(ended)
                return done

    def add_request(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        """Takes a request into the frontend."""
        super().add_request(request, *args, **kwargs)
        prompt = request.prompt_token_ids
        if prompt is None:
            return
        detokenizer = self.request_states[request.request_id].detokenizer
        if type(detokenizer) is FastIncrementalDetokenizer and not detokenizer.output_token_ids:
            start_at_tail(detokenizer, prompt)


class _Feed:
    """Gives outputs one by one, and knows which one it gave last."""

    def __init__(self, outputs: Sequence[EngineCoreOutput]) -> None:
        self._outputs = outputs
        self.place = -1
        self.present: EngineCoreOutput | None = None

    def __iter__(self) -> Iterator[EngineCoreOutput]:
        for place, output in enumerate(self._outputs):
            self.place, self.present = place, output
            yield output
        self.present = None


def start_at_tail(detokenizer: FastIncrementalDetokenizer, prompt: Sequence[int]) -> None:
    """Begins the text of an answer, of which nothing was read yet, at the end of its prompt."""
    skips = detokenizer.skip_special_tokens
    # By the module, as vLLM does it: another implementation may stand there.
    detokenizer.stream = tokenizers.decoders.DecodeStream(
        ids=tail_of(prompt, detokenizer.tokenizer, skip_special_tokens=skips),
        skip_special_tokens=skips,
    )


def tail_of(
    prompt: Sequence[int], tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool
) -> Sequence[int]:
    """Returns the last tokens of a prompt, from which an answer's text reads as from all of it.

    None, if the prompt ends within a character.
    """
    last = _last_of(prompt, _CHARACTER_TOKENS, tokenizer)
    if tokenizer.decode(last, skip_special_tokens=skip_special_tokens).endswith(_UNFINISHED):
        return ()
    return _last_of(prompt, _TAIL_TOKENS, tokenizer)


def _last_of(
    prompt: Sequence[int], num_tokens: int, tokenizer: tokenizers.Tokenizer
) -> Sequence[int]:
    """Returns so many tokens, or more where they would begin within a row of bytes."""
    start = max(0, len(prompt) - num_tokens)
    while start and (tokenizer.id_to_token(prompt[start]) or "").startswith(_BYTE_TOKEN):
        start -= 1
    return prompt[start:]
