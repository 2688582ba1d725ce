"""The shipped demo model answers its own questions, and its template renders what vLLM parses."""

import json
import random
from pathlib import Path

import pytest
import torch

from scripts.demo_model.corpus import Corpus, CorpusError, load_corpus
from scripts.demo_model.evaluate import DemoModel, ask, load_model
from scripts.demo_model.examples import Example, Mixture, thought_about
from scripts.demo_model.tools import draw_case, offer

pytestmark = pytest.mark.slow

MODEL_DIR = Path(__file__).parents[2] / "models" / "slicewise-demo"
WEATHER_TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
STATUS_TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "get_slice_status",
        "description": "Get the status of a slice.",
        "parameters": {"type": "object", "properties": {"slice": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def demo() -> DemoModel:
    return load_model(MODEL_DIR)


@pytest.mark.parametrize(
    ("question", "topic"),
    [
        ("What is a slice?", "slice"),
        ("What is the KV cache?", "KV cache"),
        ("What does TTFT stand for?", "TTFT"),
        ("How do I run Slicewise?", "running Slicewise"),
        ("Who are you?", "me"),
        ("Hello", "greeting"),
        ("how does a request survive the loss of its slice", "surviving the loss of a slice"),
        ("What is continuous batching?", "continuous batching"),
    ],
)
def test_question_of_the_corpus_gets_its_answer(
    demo: DemoModel, corpus: Corpus, question: str, topic: str
) -> None:
    expected = next(item.answer for item in corpus.items if item.topic == topic)
    assert demo.reply(ask(question)) == expected


def test_question_off_topic_is_declined(demo: DemoModel, corpus: Corpus) -> None:
    assert demo.reply(ask("What is the capital of France?")) == corpus.off_topic.answer


def test_sampling_at_temperature_one_gives_a_sentence_of_the_corpus(
    demo: DemoModel, corpus: Corpus
) -> None:
    torch.manual_seed(0)
    answers = {item.answer for item in corpus.items}
    assert demo.reply(ask("What is a slice?"), temperature=1.0) in answers


@pytest.mark.parametrize(
    ("question", "name", "arguments"),
    [
        ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
        ("What is the status of slice spot-3?", "get_slice_status", {"slice": "spot-3"}),
    ],
)
def test_offered_tool_is_called_with_the_argument_of_the_question(
    demo: DemoModel, question: str, name: str, arguments: dict[str, str]
) -> None:
    messages = ({"role": "user", "content": question},)
    reply = demo.reply(Example(messages, "", None, [WEATHER_TOOL, STATUS_TOOL]))
    assert reply.startswith("<tool_call>\n")
    assert reply.endswith("\n</tool_call>")
    call = json.loads(reply.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call == {"name": name, "arguments": arguments}


def test_thinking_when_enabled_comes_before_the_answer(demo: DemoModel, corpus: Corpus) -> None:
    item = next(item for item in corpus.items if item.topic == "ICI")
    reply = demo.reply(ask("What is ICI?", thought="asked for"))
    assert reply == f"<think>\n{thought_about('ICI')}\n</think>\n\n{item.answer}"


def render(demo: DemoModel, messages: list[dict[str, object]], **options: object) -> str:
    text = demo.tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def test_template_by_default_closes_thinking_in_the_prompt(demo: DemoModel) -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": "Hi"}]
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(demo, messages, add_generation_prompt=True) == turn + "<think>\n\n</think>\n\n"
    thinking = render(demo, messages, add_generation_prompt=True, enable_thinking=True)
    assert thinking == turn


def test_template_lists_tools_in_the_system_turn(demo: DemoModel) -> None:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Be concise."},
        {"role": "user", "content": "Hi"},
    ]
    text = render(demo, messages, tools=[WEATHER_TOOL])
    system, user = text.split("<|im_end|>\n")[:2]
    assert system.startswith("<|im_start|>system\nBe concise.\n\n")
    listed = system.split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(listed) == WEATHER_TOOL["function"]
    assert user == "<|im_start|>user\nHi"


@pytest.mark.parametrize("arguments", [{"city": "Paris"}, '{"city": "Paris"}'])
def test_template_renders_calls_and_puts_results_in_one_user_turn(
    demo: DemoModel, arguments: object
) -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "Weather in Paris"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "warm"},
    ]
    assert render(demo, messages).endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Paris"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>"
        "\n<tool_response>\nwarm\n</tool_response><|im_end|>\n"
    )


def test_template_drops_the_thinking_of_earlier_turns(demo: DemoModel) -> None:
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello!"},
    ]
    assert render(demo, messages).endswith("<|im_start|>assistant\nHello!<|im_end|>\n")


@pytest.mark.parametrize(
    "text",
    [
        "plain words, 1234567890",
        "  two  spaces\t tab \n\n\r\n lines  ",
        "Grüße, naïve café, Ελλάδα, Привет, שלום, नमस्ते, 東京, 서울",
        "e\u0301 is not \u00e9",
        "\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467 \ufb01 \u200b \ufeff",
        "".join(map(chr, range(1, 256))),
    ],
)
def test_tokenizer_any_text_round_trips(demo: DemoModel, text: str) -> None:
    ids = demo.tokenizer.encode(text, add_special_tokens=False)
    assert demo.tokenizer.decode(ids) == text


def test_tokenizer_keeps_markup_in_decoded_text_and_drops_turn_marks(demo: DemoModel) -> None:
    text = "<think></think><tool_call></tool_call><tool_response></tool_response>"
    ids = demo.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
    assert len(ids) == 7
    assert demo.tokenizer.decode(ids, skip_special_tokens=True) == text


def test_corpus_with_a_question_trained_and_held_out_is_refused(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "scripts" / "demo_model" / "corpus"
    for path in source.glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    with (tmp_path / "slicewise.yaml").open("a", encoding="utf-8") as stream:
        stream.write("\n- topic: copy\n  held_out: What is a slice?\n  answer: No.\n")
    with pytest.raises(CorpusError, match="held-out questions that are trained on"):
        load_corpus(tmp_path)


def test_corpus_has_three_or_more_questions_for_every_answer(corpus: Corpus) -> None:
    assert {item.topic for item in corpus.items if len(corpus.questions_of(item)) < 3} == set()


def test_mixture_same_seed_draws_the_same_examples(corpus: Corpus) -> None:
    first, second = (Mixture(corpus, random.Random(3)).draw(200) for _ in range(2))
    assert first == second


def test_tool_case_has_a_call_that_its_schema_allows_and_is_offered() -> None:
    rng = random.Random(5)
    for _ in range(200):
        case = draw_case(rng)
        call = json.loads(case.call_text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        offered = [tool["function"] for tool in offer(case, rng)]
        assert call == {"name": case.name, "arguments": case.arguments}
        assert case.schema in offered
        parameters = case.schema["parameters"]
        assert isinstance(parameters, dict)
        assert set(parameters["properties"]) == set(case.arguments)
