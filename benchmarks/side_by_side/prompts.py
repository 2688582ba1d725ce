"""Makes chat requests whose prompts have an exact length, template included, and no common start.

Asks the shipped model's tokenizer in this process: not every server has an endpoint for that.
"""

import json
from functools import cache

from transformers import AutoTokenizer

from benchmarks.servers import MODEL
from benchmarks.side_by_side.loads import PROMPT_TOKENS
from loadtest.planned_request import PromptBlock
from loadtest.workload.discovery import discover_vocabulary
from loadtest.workload.prompts import Vocabulary, prompt_text, template_overhead, within_template
from serving.artifacts.model_source import resolve_source

SOURCE = "models/slicewise-demo"


def request_bytes(host: str, content_id: str, output_tokens: int) -> bytes:
    """Returns a whole HTTP request. Prompts of different `content_id` have different words."""
    vocabulary, overhead = _material()
    blocks = within_template([PromptBlock(content_id, PROMPT_TOKENS)], overhead)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt_text(blocks, vocabulary)}],
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@cache
def _material() -> tuple[Vocabulary, int]:
    """The words of the tokenizer, and how many tokens its chat template adds."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_source(SOURCE))

    def tokenize(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def tokenize_messages(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenize(text)

    vocabulary = discover_vocabulary(tokenize, tokenizer.decode)
    return vocabulary, template_overhead(tokenize_messages, vocabulary)
