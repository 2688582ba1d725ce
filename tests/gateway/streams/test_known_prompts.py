"""Prompts made past vLLM's renderer are its prompts; where that is not sure, it makes them."""

import copy
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.renderers.params import ChatParams, TokenizeParams

from serving.config.application import GatewayConfig
from serving.gateway.model_version import ModelVersion
from serving.gateway.streams.known.prompts import FormPrompts, prompts_of
from tests.gateway.test_forged_resume import CONFIG

pytestmark = pytest.mark.imports_vllm

# As vLLM's chat gives them to its renderer, for the model of the tests.
CHAT = ChatParams(
    chat_template_kwargs={"add_generation_prompt": True, "continue_final_message": False}
    | {"tools": None, "documents": None, "tokenize": False}
)
TOKENS = TokenizeParams(max_total_tokens=512, max_output_tokens=16, add_special_tokens=False)
# One that takes no system prompt, counts what it gets, and knows the turn it is.
STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}"
    "{{ loop.index }}:{{ message['role'] }}:{{ message['content'] | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ style | default('plain') }}{% endif %}"
)
TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(
        st.sampled_from(("<|im_start|>", "<s>", "</s>", "\r\n", "  ", "{{ x }}", "slice", "é")),
        max_size=8,
    ).map("".join),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("system", "user", "assistant")), "content": TEXTS}
    ),
    min_size=1,
    max_size=6,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def renderer() -> AsyncIterator[Any]:
    version = await ModelVersion.build(CONFIG, GatewayConfig())
    yield version.llm.renderer
    version.llm.shutdown()


def by_vllm(renderer: Any, messages: list[Any], chat: ChatParams = CHAT) -> list[int]:
    _, (prompt,) = renderer.render_chat([messages], chat, TOKENS)
    token_ids: list[int] = prompt["prompt_token_ids"]
    return token_ids


def outcome(make: Any) -> Any:
    """What is made; `None` if it is refused."""
    try:
        return make()
    except Exception:  # noqa: BLE001 - vLLM's refusals have no class in common
        return None


@pytest.mark.parametrize(
    "chat",
    [
        CHAT,
        replace(CHAT, chat_template=STRICT),
        replace(
            CHAT,
            chat_template=STRICT,
            chat_template_kwargs=CHAT.chat_template_kwargs | {"style": "short", "bos_token": "!"},
        ),
    ],
    ids=["the-models", "strict", "strict-with-variables"],
)
def test_prompts_are_those_of_vllms_renderer(renderer: Any, chat: ChatParams) -> None:
    prompts = prompts_of(renderer, (chat,), {"tok_params": TOKENS})
    assert prompts is not None

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(MESSAGES)
    def same(messages: list[Any]) -> None:
        before = copy.deepcopy(messages)
        ours = outcome(lambda: prompts.make(messages))
        assert messages == before
        vllms = outcome(lambda: by_vllm(renderer, messages, chat))
        # What is not made here is made, or refused, by vLLM.
        assert ours in (vllms, None)
        assert ours is not None or vllms in (None, [])

    same()


def test_prompt_longer_than_the_model_reads_is_not_made(renderer: Any) -> None:
    prompts = prompts_of(renderer, (CHAT, TOKENS), {})
    assert prompts is not None
    with pytest.raises(ValueError, match="how long a prompt may be"):
        prompts.make([{"role": "user", "content": "a slice " * 600}])


ASKED = CHAT.chat_template_kwargs


@pytest.mark.parametrize(
    ("chat", "tokens"),
    [
        (replace(CHAT, chat_template_kwargs=ASKED | {"tokenize": True}), TOKENS),
        (replace(CHAT, chat_template_kwargs=ASKED | {"tools": [{"type": "function"}]}), TOKENS),
        (replace(CHAT, chat_template_kwargs=ASKED | {"documents": [{"text": "x"}]}), TOKENS),
        (replace(CHAT, chat_template_kwargs=ASKED | {"continue_final_message": True}), TOKENS),
        (CHAT, replace(TOKENS, truncate_prompt_tokens=8)),
        (CHAT, replace(TOKENS, pad_prompt_tokens=8)),
        (replace(CHAT, chat_template="{{ raise_exception('no') }}"), TOKENS),
    ],
    ids=["tokens", "tools", "documents", "continues", "cut", "filled", "all-refused"],
)
def test_prompts_of_other_forms_are_vllms(
    renderer: Any, chat: ChatParams, tokens: TokenizeParams
) -> None:
    assert prompts_of(renderer, (chat, tokens), {}) is None


def test_tokenizer_that_cuts_is_left_to_vllm(renderer: Any) -> None:
    backend = renderer.get_tokenizer()._tokenizer
    backend.enable_truncation(4)
    try:
        assert prompts_of(renderer, (CHAT, TOKENS), {}) is None
    finally:
        backend.no_truncation()
    assert prompts_of(renderer, (CHAT, TOKENS), {}) is not None


def test_renderer_that_makes_other_prompts_makes_them(
    renderer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason: it is tried, not believed."""
    encode = renderer._tokenize_prompt

    def with_another_token(*args: Any) -> Any:
        prompt = encode(*args)
        return prompt | {"prompt_token_ids": [*prompt["prompt_token_ids"], 1]}

    monkeypatch.setattr(renderer, "_tokenize_prompt", with_another_token)
    assert prompts_of(renderer, (CHAT, TOKENS), {}) is None


def test_renderer_of_another_kind_makes_its_prompts(renderer: Any) -> None:
    with pytest.raises(ValueError, match="renderer of its own"):
        FormPrompts(
            SimpleNamespace(  # type: ignore[arg-type]
                get_tokenizer=renderer.get_tokenizer, model_config=renderer.model_config
            ),
            CHAT,
            TOKENS,
        )
