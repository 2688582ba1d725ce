"""Engine arguments as a YAML file has them: sections are mappings."""

import pytest

from serving.vllm_args import async_engine_args

pytestmark = pytest.mark.vllm


def test_section_given_as_a_mapping_becomes_vllms_record() -> None:
    args = async_engine_args(
        "models/slicewise-demo",
        {
            "structured_outputs_config": {"backend": "xgrammar"},
            "reasoning_parser": "qwen3",
            "max_model_len": 512,
        },
    )
    section = args.create_structured_outputs_config()
    assert (section.backend, section.reasoning_parser) == ("xgrammar", "qwen3")
    assert args.max_model_len == 512


def test_argument_that_is_a_mapping_by_nature_stays_one() -> None:
    args = async_engine_args("models/slicewise-demo", {"hf_overrides": {"num_hidden_layers": 2}})
    assert args.hf_overrides == {"num_hidden_layers": 2}


def test_unknown_key_of_a_section_is_refused() -> None:
    with pytest.raises(ValueError, match="no_such_key"):
        async_engine_args("m", {"structured_outputs_config": {"no_such_key": 1}})
