"""One page out of several registries."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from serving.gateway.metrics.page import render_metrics


def model_registry(model: str, num_requests: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    counter = Counter("vllm:request_success", "Requests.", ["model_name"], registry=registry)
    counter.labels(model).inc(num_requests)
    histogram = Histogram("vllm:ttft_seconds", "TTFT.", ["model_name"], registry=registry)
    histogram.labels(model).observe(0.5)
    Gauge("vllm:num_requests_running", "Running.", ["model_name"], registry=registry).labels(model)
    return registry


async def test_family_of_two_registries_is_named_once_with_the_samples_of_both() -> None:
    body, content_type = await render_metrics([model_registry("one", 3), model_registry("two", 5)])
    text = body.decode()
    assert text.count("# TYPE vllm:request_success_total") == 1
    assert text.count("# TYPE vllm:ttft_seconds histogram") == 1
    samples = {
        sample.labels["model_name"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
    }
    assert samples == {"one": 3, "two": 5}
    assert content_type.startswith("text/plain")


async def test_rendering_twice_shows_the_same_page() -> None:
    registries = [model_registry("one", 3), model_registry("two", 5)]
    assert await render_metrics(registries) == await render_metrics(registries)


async def test_families_of_a_single_engines_scheduler_are_left_out() -> None:
    body, _ = await render_metrics([model_registry("one", 1)])
    assert b"num_requests_running" not in body


async def test_without_registries_the_page_is_empty() -> None:
    assert (await render_metrics([]))[0] == b""


async def test_page_for_open_metrics_has_the_same_names_and_values() -> None:
    registries = [model_registry("one", 3), model_registry("two", 5)]
    accept = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,*/*;q=0.1"
    body, content_type = await render_metrics(registries, "g1", accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    plain = (await render_metrics(registries, "g1"))[0].decode()
    seen, expected = (
        {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
        for families in (
            openmetrics.text_string_to_metric_families(body.decode()),
            text_string_to_metric_families(plain),
        )
    )
    assert seen == expected
    assert any(name == "vllm:request_success_total" for name, _ in seen)


def large_registry(num_series: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    gauge = Gauge(
        "slice_seconds", "Of a slice.\n# Said in two lines.", ["slice"], registry=registry
    )
    for number in range(num_series):
        gauge.labels(f"s-{number}\r# not a comment").set(number)
    return registry


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text"])
async def test_family_that_is_written_in_pieces_has_one_head_and_every_series(accept: str) -> None:
    body, _ = await render_metrics([], "g", accept, ours=[large_registry(1001)])
    lines = body.decode().split("\n")
    assert [line for line in lines if line.startswith("# TYPE")] == ["# TYPE slice_seconds gauge"]
    assert len([line for line in lines if line.startswith("# HELP")]) == 1
    samples = [line for line in lines if line and not line.startswith("# ")]
    assert [float(line.rpartition(" ")[2]) for line in samples] == [*range(1001)]
    assert body.endswith(b"# EOF\n") == bool(accept)


async def test_large_page_lets_the_tokens_through() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    await render_metrics([], "g", ours=[large_registry(5000)])
    beside.cancel()
    # Five thousand series take some tens of milliseconds; a turn is due every two.
    assert turns > 3
