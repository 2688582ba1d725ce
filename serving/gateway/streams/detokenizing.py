"""Begins the text of an answer from the end of its prompt, however long the prompt is.

vLLM gives the whole prompt to the decoder of an answer's text, which decodes all of it at the first
token: 45 ms of the event loop for 190,000 tokens. The text of an answer depends on no more than the
prompt's last tokens. Works on vLLM's objects as they come.
"""

from collections.abc import Sequence
from typing import Any

import tokenizers
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor

# Kept of a longer prompt, at least: what lies before cannot change how the next token reads.
_TAIL_TOKENS = 64
# To look at a tail costs as much as to decode some hundred tokens.
_LONG_TOKENS = 512
# Tokenizers with byte fallback write the bytes of one character as tokens of this form, and decode
# a row of them together: a row is not divided.
_BYTE_TOKEN = "<0x"
# What an unfinished character reads as.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TailOutputProcessor(OutputProcessor):
    """Does what vLLM's does."""

    def add_request(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        """Takes a request into the frontend."""
        super().add_request(request, *args, **kwargs)
        prompt = request.prompt_token_ids
        if prompt is None or len(prompt) <= _LONG_TOKENS:
            return
        detokenizer = self.request_states[request.request_id].detokenizer
        if type(detokenizer) is FastIncrementalDetokenizer and not detokenizer.output_token_ids:
            # By the module, as vLLM does it: another implementation may stand there.
            detokenizer.stream = tokenizers.decoders.DecodeStream(
                ids=tail_of(
                    prompt,
                    detokenizer.tokenizer,
                    skip_special_tokens=detokenizer.skip_special_tokens,
                ),
                skip_special_tokens=detokenizer.skip_special_tokens,
            )


def tail_of(
    prompt: Sequence[int], tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool
) -> Sequence[int]:
    """Returns the last tokens of a prompt, from which an answer's text reads as from all of it.

    Of a prompt that ends within a character that is all of it: the decoder then repeats what it was
    given.
    """
    start = max(0, len(prompt) - _TAIL_TOKENS)
    while start and (tokenizer.id_to_token(prompt[start]) or "").startswith(_BYTE_TOKEN):
        start -= 1
    tail = prompt[start:]
    text = tokenizer.decode(tail, skip_special_tokens=skip_special_tokens)
    return prompt if text.endswith(_UNFINISHED) else tail
