"""Makes the prompts of a known form with the model's template and tokenizer, called directly.

vLLM's renderer finds the template, its variables and the tokenizer's settings anew for each
request, and its tokenizer makes three records of one list of tokens. For one form all of that is
always the same, so it is found once, with vLLM's own functions. Whether prompts come out as vLLM's
do is not believed but tried, on conversations that templates and tokenizers tell apart.

Works on vLLM's and transformers' objects as they come.
"""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import (
    HfRenderer,
    resolve_chat_template,
    resolve_chat_template_content_format,
    resolve_chat_template_kwargs,
)
from vllm.renderers.params import ChatParams, TokenizeParams

_TEXTS = (
    "What is a slice?",
    "  Two  blanks, a\ttab,\r\nand lines.\n\n ",
    "Ünïcödé e\u0301 \u6f22\u5b57 \u200b\U0001f9e9 \u202eright to left",
    "{{ messages }} {% raw %} <|im_start|>system <s>[INST] <think>\n</think> </s>",
    "",
)
_ORDERS = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "user"),
)
# Of transformers' `apply_chat_template`: what it does not hand to the template.
_ITS_OWN = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


class FormPrompts:
    """Makes the prompts of one form."""

    def __init__(self, renderer: HfRenderer, chat: ChatParams, tokens: TokenizeParams) -> None:
        """Reads what prompts are made of; raises `ValueError` if they take more than is done here.

        `chat` and `tokens` are the arguments of vLLM's `render_chat` behind the conversations.
        """
        tokenizer, config = renderer.get_tokenizer(), renderer.model_config
        backend = getattr(tokenizer, "_tokenizer", None)
        if backend is None or backend.truncation is not None or backend.padding is not None:
            raise ValueError("the tokenizer cuts or fills prompts, or is a slow one")
        if backend.encode_special_tokens != tokenizer.split_special_tokens:
            raise ValueError("the tokenizer reads special tokens in another way")
        if type(renderer) is not HfRenderer or config.enable_prompt_embeds:
            raise ValueError("the model has a renderer of its own, or prompts of other than text")
        if (
            tokens.truncate_prompt_tokens is not None
            or tokens.pad_prompt_tokens is not None
            or tokens.return_token_offsets
        ):
            raise ValueError("prompts are cut or filled")
        arguments = chat.get_apply_chat_template_kwargs()
        if arguments.pop("tokenize", True) or arguments.pop("tools", None) is not None:
            raise ValueError("prompts have tools, or are no text in between")
        template = resolve_chat_template(
            tokenizer,
            chat_template=arguments.pop("chat_template", None),
            tools=None,
            model_config=config,
        )
        if template is None:
            raise ValueError("the model has no template")
        resolved = resolve_chat_template_kwargs(tokenizer, template, arguments)
        self._variables = _variables_of(tokenizer, resolved)
        self._template = _compile_jinja_template(template)
        self._content_format = resolve_chat_template_content_format(
            chat_template=chat.chat_template,
            tools=None,
            given_format=chat.chat_template_content_format,
            tokenizer=tokenizer,
            model_config=config,
        )
        self._config, self._chat, self._tokens = config, chat, tokens
        # The quickest that it has: where in the text a token stands is not asked.
        self._tokenizer, self._encode = tokenizer, backend.encode_batch_fast

    def make(self, messages: Sequence[Any]) -> list[int]:
        """Returns a prompt's tokens; raises if vLLM refuses it, or would word something else."""
        conversation, _, _ = parse_chat_messages(
            list(messages),
            self._config,
            content_format=self._content_format,
            media_io_kwargs=self._chat.media_io_kwargs,
            mm_processor_kwargs=self._chat.mm_processor_kwargs,
        )
        text = self._template.render(messages=conversation, **self._variables)
        checked = self._tokens.apply_pre_tokenization(self._tokenizer, {"prompt": text})
        (encoding,) = self._encode(
            [checked["prompt"]], add_special_tokens=self._tokens.add_special_tokens
        )
        token_ids: list[int] = encoding.ids
        most = self._tokens.max_input_tokens
        if not token_ids or (most is not None and len(token_ids) > most):
            raise ValueError("vLLM says how long a prompt may be")
        return token_ids


def prompts_of(
    renderer: Any, arguments: Sequence[Any], named: Mapping[str, Any]
) -> FormPrompts | None:
    """Returns how the prompts of a form are made; `None` if only vLLM's renderer can.

    The form's requests call `renderer.render_chat` with `arguments` and `named` behind their
    conversations.
    """
    try:
        given = inspect.signature(renderer.render_chat).bind([], *arguments, **named).arguments
        tokens = given.get("tok_params") or renderer.default_chat_tok_params
        prompts = FormPrompts(renderer, given["chat_params"], tokens)
        made = [(messages, _made_by(prompts, messages)) for messages in _tried()]
        proofs = [
            renderer.render_chat([messages], *arguments, **named)[1][0]["prompt_token_ids"]
            == prompt
            for messages, prompt in made
            if prompt is not None
        ]
    except Exception:  # noqa: BLE001 - whatever it is, prompts are not what is known here
        return None
    return prompts if proofs and all(proofs) else None


def _variables_of(
    tokenizer: PreTrainedTokenizerBase, resolved: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns what a template is given beside the messages."""
    variables = {"tools": None, "documents": None, "add_generation_prompt": False}
    variables |= tokenizer.special_tokens_map
    for name, value in resolved.items():
        if name == "add_generation_prompt" or name not in _ITS_OWN:
            variables[name] = value
        elif value:
            raise ValueError(f"the template's text is changed by {name}")
    return variables


def _tried() -> list[list[dict[str, str]]]:
    """Returns conversations of some orders, with all the texts among them."""
    texts = itertools.cycle(_TEXTS)
    return [[{"role": role, "content": next(texts)} for role in order] for order in _ORDERS]


def _made_by(prompts: FormPrompts, messages: list[dict[str, str]]) -> list[int] | None:
    """Returns a prompt; `None` if a template allows no such order, for instance."""
    try:
        return prompts.make(messages)
    except Exception:  # noqa: BLE001 - what is not made here will be vLLM's to make
        return None
