"""What a configuration may say of traces and log lines, and how they travel from there."""

import logging
from typing import Any

import pytest

from serving.config.application import AppConfig, check_app_config
from serving.domain.errors import ConfigError
from serving.telemetry.process_log import LogStyle
from serving.telemetry.spans import TraceSettings

MODEL = {"name": "m", "source": "s", "engine": "paced", "deployments": [{"compute_class": "local"}]}


def config_with(**sections: Any) -> AppConfig:
    return check_app_config({"models": [MODEL], **sections}, None)


def test_without_a_word_nothing_is_traced_and_lines_are_text() -> None:
    config = config_with()
    assert config.tracing.settings == TraceSettings(None)
    assert config.logging.style == LogStyle(is_json=False, level=logging.INFO)


def test_sections_reach_tracer_and_log() -> None:
    config = config_with(
        tracing={"otlp_endpoint": "https://collector.example:4318/otlp", "sample_ratio": 0.25},
        logging={"format": "json", "level": "debug"},
    )
    assert config.tracing.settings == TraceSettings("https://collector.example:4318/otlp", 0.25)
    assert config.logging.style == LogStyle(is_json=True, level=logging.DEBUG)


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"tracing": {"otlp_endpoint": "collector:4317"}}, "an address such as"),
        ({"tracing": {"otlp_endpoint": "http://c", "sample_ratio": 1.5}}, "0 to 1"),
        ({"tracing": {"sample_ratio": 0.5}}, "required with tracing.sample_ratio"),
        ({"tracing": {"endpoint": "http://c"}}, "did you mean 'otlp_endpoint'"),
        ({"logging": {"format": "xml"}}, "one of text, json"),
        ({"logging": {"level": "trace"}}, "one of debug, info, warning"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(
    sections: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config_with(**sections)
