"""vLLM's metrics of an engine and the health of its link, as they stand on a gateway's page."""

from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from serving.gateway.metrics.engines import LinkCollector, LinkReading
from serving.link.connection import Traffic
from serving.link.messages import (
    ITERATION_BOUNDS,
    EngineLoad,
    EngineStats,
    ProgramCounts,
    ProgramsMoved,
)
from serving.telemetry.metric_names import (
    ALL,
    ENGINE_STEPS,
    LINKS,
    MAX_DRAFT_POSITIONS,
    PROGRAMS,
    VLLM_ENGINES,
)

from .rendered import rendered

LABELS = {"engine": "e1", "slice": "s-1", "model": "chat", "compute_class": "spot"}
WHOLE = EngineStats(
    num_deferred=2,
    num_preemptions=3,
    prompt_tokens=100,
    local_cached_tokens=30,
    external_cached_tokens=10,
    generation_tokens=50,
    num_steps=4,
    busy_s=0.5,
    iteration_tokens=110,
    iteration_counts=[1] + [0] * (len(ITERATION_BOUNDS) - 1) + [4],
    prefix_cache=(90, 30),
    external_prefix_cache=(60, 10),
    drafts=(5, 15, 9),
    accepted_by_position=[5, 4],
    is_yours=True,
    programs=ProgramCounts(hits=70, misses=2, late=1),
    programs_moved=ProgramsMoved(
        pulled=69, pull_s=0.5, pushed_bytes=4096, damaged=2, rebuilt=1, failures=3
    ),
    longest_turn_s=0.25,
    num_places=60,
)
READING = LinkReading(
    *("chat", "spot", "e1", "s-1"),
    Traffic(bytes_in=1000, bytes_out=200, messages_in=30, messages_out=20),
    silence_s=0.125,
    round_trip_s=0.25,
    load=EngineLoad(7, 1, 0.5),
    engine_stats=WHOLE,
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def page(*readings: LinkReading) -> Samples:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LinkCollector(lambda: readings))
    return samples_of(rendered([], ours=[registry]))


def samples_of(text: bytes) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_what_the_engine_told_stands_under_vllms_names_with_slice_and_class() -> None:
    samples = page(READING)

    def value(name: str, **more: str) -> float:
        labels = LABELS | {"model_name": "chat"} | more
        return samples[f"vllm:{name}", frozenset(labels.items())]

    assert value("num_requests_running") == 7
    assert value("num_requests_waiting") == 1 + 2
    assert value("num_requests_waiting_by_reason", reason="deferred") == 2
    assert value("kv_cache_usage_perc") == 0.5
    assert value("num_preemptions_total") == 3
    assert value("prompt_tokens_total") == 100
    assert value("prompt_tokens_by_source_total", source="local_compute") == 60
    assert value("prompt_tokens_cached_total") == 40
    assert value("generation_tokens_total") == 50
    assert value("prefix_cache_queries_total") == 90
    assert value("external_prefix_cache_hits_total") == 10
    assert value("iteration_tokens_total_sum") == 110
    assert value("iteration_tokens_total_bucket", le="8.0") == 1
    assert value("iteration_tokens_total_count") == 5
    assert value("spec_decode_num_accepted_tokens_per_pos_total", position="1") == 4


def test_steps_and_link_are_told_by_engine() -> None:
    samples = page(READING)

    def value(name: str, **more: str) -> float:
        return samples[f"slicewise_{name}", frozenset((LABELS | more).items())]

    assert value("engine_step_seconds_total") / value("engine_steps_total") == 0.125
    assert value("engine_places") == 60
    assert value("link_bytes_total", direction="in") == 1000
    assert value("link_messages_total", direction="out") == 20
    assert value("link_silence_seconds") == 0.125
    assert value("link_round_trip_seconds") == 0.25


def test_compiled_programs_are_told_by_engine() -> None:
    samples = page(READING)

    def value(name: str, **more: str) -> float:
        return samples[f"slicewise_programs_{name}", frozenset((LABELS | more).items())]

    assert [value(f"{name}_total") for name in ("found", "compiled", "late")] == [70, 2, 1]
    assert value("moved_bytes_total", direction="push") == 4096
    assert value("move_seconds_total", direction="pull") == 0.5
    assert [value(f"{name}_total") for name in ("damaged", "move_failures")] == [2, 3]


def test_every_name_and_label_is_the_registrys_and_none_is_missing() -> None:
    seen = {
        name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum"): dict(labels)
        for name, labels in page(READING)
    }
    of_engines = (*VLLM_ENGINES, *ENGINE_STEPS, *PROGRAMS, *LINKS)
    assert set(seen) == {metric.name for metric in of_engines}
    for name, labels in seen.items():
        assert set(labels) - {"le"} == {*LABELS, *ALL[name].labels}


def test_what_an_engine_does_not_have_is_absent_and_not_zero() -> None:
    bare = replace(READING, engine_stats=EngineStats(is_yours=True), round_trip_s=None)
    names = {name for name, _ in page(bare)}
    assert "vllm:generation_tokens_total" in names
    assert not [name for name in names if "prefix_cache" in name or "spec_decode" in name]
    assert not [name for name in names if "programs" in name]
    assert "slicewise_link_round_trip_seconds" not in names


def test_engine_that_another_gateway_shows_has_its_link_here_only() -> None:
    others = replace(READING, engine_stats=EngineStats(generation_tokens=5))
    silent = replace(READING, load=None, engine_stats=None)
    for reading in (others, silent):
        assert {name for name, _ in page(reading)} == {metric.name for metric in LINKS}


def test_positions_of_drafts_are_bounded() -> None:
    engine_stats = EngineStats(drafts=(1, 99, 99), accepted_by_position=[1] * 99, is_yours=True)
    samples = page(replace(READING, engine_stats=engine_stats))
    positions = [name for name, _ in samples if name.endswith("_per_pos_total")]
    assert len(positions) == MAX_DRAFT_POSITIONS


def test_engines_families_replace_those_of_vllms_frontend() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry(auto_describe=False)
    counter = Counter("vllm:generation_tokens", "T.", ["engine"], registry=theirs)
    counter.labels("0").inc(7)
    ours.register(LinkCollector(lambda: [READING]))
    text = rendered([theirs], "g", ours=[ours])
    values = [
        value for (name, _), value in samples_of(text).items() if name == f"{counter._name}_total"
    ]
    assert values == [50]
