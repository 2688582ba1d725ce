"""Presents an engine's work and its link's as Prometheus families, read at scrape time.

Owns which number has which name, vLLM's own names among them. Each family of vLLM has one source.
These families are the engine's and cover all its requests. vLLM's frontend counts under the same
names for one gateway, and those are left out of the page (`metrics.page`). Each engine is shown by
one gateway at a time, the one that the engine host chose: sums over gateways are right, and pages
stay small.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from serving.gateway.metrics.requests import Families
from serving.gateway.telemetry.request_metrics import Histogram
from serving.link.connection import Traffic
from serving.link.messages import ITERATION_BOUNDS, EngineLoad, EngineStats
from serving.telemetry.metric_names import MAX_DRAFT_POSITIONS


@dataclass(frozen=True, slots=True)
class LinkReading:
    """The reading of one link and the engine behind it.

    `slice_name` is `None` if it has none, or none is known yet. `load` and `engine_stats` are
    `None` until the engine host has reported them, `round_trip_s` until one was measured.
    """

    model: str
    compute_class: str
    engine_id: str
    slice_name: str | None
    traffic: Traffic
    silence_s: float
    round_trip_s: float | None
    load: EngineLoad | None
    engine_stats: EngineStats | None


class LinkCollector(Collector):
    """Collects the present links. Values that an engine has not reported yet are left out."""

    def __init__(self, read: Callable[[], Iterable[LinkReading]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        """Yields the present families."""
        families = Families()
        for reading in self._read():
            labels = {
                "engine": reading.engine_id,
                "slice": reading.slice_name or "",
                "model": reading.model,
                "compute_class": reading.compute_class,
            }
            _add_link(families, labels, reading)
            stats = reading.engine_stats
            if reading.load is not None and stats is not None and stats.is_yours:
                _add_steps(families, labels, stats)
                _add_programs(families, labels, stats)
                named = labels | {"model_name": reading.model}
                _add_vllm(families, named, reading.load, stats)
        yield from families


def _add_link(families: Families, labels: Mapping[str, str], reading: LinkReading) -> None:
    traffic = reading.traffic
    for direction, num_bytes, num_messages in (
        ("in", traffic.bytes_in, traffic.messages_in),
        ("out", traffic.bytes_out, traffic.messages_out),
    ):
        directed = {**labels, "direction": direction}
        families.add("slicewise_link_bytes_total", directed, num_bytes)
        families.add("slicewise_link_messages_total", directed, num_messages)
    families.add("slicewise_link_silence_seconds", labels, reading.silence_s)
    if reading.round_trip_s is not None:
        families.add("slicewise_link_round_trip_seconds", labels, reading.round_trip_s)


def _add_steps(families: Families, labels: Mapping[str, str], stats: EngineStats) -> None:
    families.add("slicewise_engine_host_longest_turn_seconds", labels, stats.longest_turn_s)
    families.add("slicewise_engine_steps_total", labels, stats.num_steps)
    families.add("slicewise_engine_step_seconds_total", labels, stats.busy_s)
    if stats.num_places is not None:
        families.add("slicewise_engine_places", labels, stats.num_places)


def _add_programs(families: Families, labels: Mapping[str, str], stats: EngineStats) -> None:
    if stats.programs is not None:
        counts = stats.programs
        families.add("slicewise_programs_found_total", labels, counts.hits)
        families.add("slicewise_programs_compiled_total", labels, counts.misses)
        families.add("slicewise_programs_late_total", labels, counts.late)
    moved = stats.programs_moved
    if moved is None:
        return
    for direction, num_bytes, duration_s in (
        ("pull", moved.pulled_bytes, moved.pull_s),
        ("push", moved.pushed_bytes, moved.push_s),
    ):
        directed = {**labels, "direction": direction}
        families.add("slicewise_programs_moved_bytes_total", directed, num_bytes)
        families.add("slicewise_programs_move_seconds_total", directed, duration_s)
    families.add("slicewise_programs_damaged_total", labels, moved.damaged)
    families.add("slicewise_programs_move_failures_total", labels, moved.failures)


def _add_vllm(
    families: Families, labels: Mapping[str, str], load: EngineLoad, stats: EngineStats
) -> None:
    def add(name: str, value: float | Histogram, **more: str) -> None:
        families.add(f"vllm:{name}", {**labels, **more}, value)

    add("num_requests_running", load.num_running)
    add("num_requests_waiting", load.num_waiting + stats.num_deferred)
    add("num_requests_waiting_by_reason", load.num_waiting, reason="capacity")
    add("num_requests_waiting_by_reason", stats.num_deferred, reason="deferred")
    add("kv_cache_usage_perc", load.kv_usage_ratio)
    add("num_preemptions_total", stats.num_preemptions)
    add("generation_tokens_total", stats.generation_tokens)
    cached = stats.local_cached_tokens + stats.external_cached_tokens
    add("prompt_tokens_total", stats.prompt_tokens)
    add("prompt_tokens_cached_total", cached)
    for source, tokens in (
        ("local_compute", stats.prompt_tokens - cached),
        ("local_cache_hit", stats.local_cached_tokens),
        ("external_kv_transfer", stats.external_cached_tokens),
    ):
        add("prompt_tokens_by_source_total", tokens, source=source)
    for name, cache in (
        ("prefix_cache", stats.prefix_cache),
        ("external_prefix_cache", stats.external_prefix_cache),
    ):
        if cache is not None:
            add(f"{name}_queries_total", cache[0])
            add(f"{name}_hits_total", cache[1])
    if stats.iteration_counts:
        steps = Histogram(ITERATION_BOUNDS)
        steps.counts, steps.total = stats.iteration_counts, stats.iteration_tokens
        add("iteration_tokens_total", steps)
    if stats.drafts is not None:
        drafts, tokens, accepted = stats.drafts
        add("spec_decode_num_drafts_total", drafts)
        add("spec_decode_num_draft_tokens_total", tokens)
        add("spec_decode_num_accepted_tokens_total", accepted)
        by_position = stats.accepted_by_position[:MAX_DRAFT_POSITIONS]
        for position, count in enumerate(by_position):
            add("spec_decode_num_accepted_tokens_per_pos_total", count, position=str(position))
