"""The gateway's `/metrics`: several registries as one page, each metric family once.

vLLM registers the same family names for every model it serves in a process, so each model has a
registry of its own; Prometheus takes a page that names a family twice as broken.

Each series says which gateway it is of: several answer behind one address in turns, and without
that their counters would read as one that goes back and forth.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from serving.metric_names import GATEWAY_LABEL

# Families that vLLM's frontend derives from one engine's steps. Here there are many engines: most
# would stay at their initial zero, the others count this gateway's requests only. Of engines that
# tell them, `engine_metrics` has the true ones.
_SCHEDULER_FAMILIES = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
        "vllm:engine_sleep_state",
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:external_prefix_cache_queries",
        "vllm:external_prefix_cache_hits",
        "vllm:num_preemptions",
        "vllm:iteration_tokens_total",
        "vllm:prompt_tokens",
        "vllm:prompt_tokens_by_source",
        "vllm:prompt_tokens_cached",
        "vllm:prompt_tokens_cached_by_source",
        "vllm:generation_tokens",
        "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "vllm:spec_decode_num_draft_tokens_per_pos",
    }
)

_OPEN_METRICS = "application/openmetrics-text"


class _Merged(Collector):
    def __init__(
        self,
        registries: Iterable[CollectorRegistry],
        ours: Iterable[CollectorRegistry],
        labels: dict[str, str],
    ) -> None:
        self._registries = (*registries, *ours)
        self._ours = frozenset(map(id, ours))
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                if family.name in _SCHEDULER_FAMILIES and id(registry) not in self._ours:
                    continue
                family.samples = [
                    sample._replace(labels=self._labels | sample.labels)
                    for sample in family.samples
                ]
                known = families.get(family.name)
                if known is None:
                    families[family.name] = family
                else:
                    known.samples.extend(family.samples)
        yield from families.values()


def render_metrics(
    registries: Iterable[CollectorRegistry],
    gateway_id: str | None = None,
    accept: str = "",
    ours: Iterable[CollectorRegistry] = (),
) -> tuple[bytes, str]:
    """The page and its content type. `gateway_id` is `None` where nothing has to be told apart.

    Of `registries` the families of a single engine are left out, of `ours` nothing.
    `accept` is what the reader takes (HTTP's `Accept`). With OpenMetrics in it the page is that,
    and its histograms carry exemplars, which Prometheus' own text format has no place for.
    """
    merged = CollectorRegistry(auto_describe=False)
    labels = {} if gateway_id is None else {GATEWAY_LABEL: gateway_id}
    merged.register(_Merged(registries, tuple(ours), labels))
    if _OPEN_METRICS in accept.lower():
        # Other ways of escaping turn the colon of vLLM's names into `_` (prometheus-client 0.26).
        page = openmetrics.generate_latest(merged, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return page, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(merged), CONTENT_TYPE_LATEST
