"""The gateway's `/metrics`: several registries as one page, each metric family once.

vLLM registers the same family names for every model it serves in a process, so each model has a
registry of its own; Prometheus takes a page that names a family twice as broken.

Each series names its gateway: several answer behind one address in turns. Without the label their
counters would read as one that goes back and forth.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from copy import copy

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from serving.telemetry.metric_names import GATEWAY_LABEL

# Families that vLLM's frontend derives from one engine's steps. Here there are many engines: most
# would stay at their initial zero, the others count this gateway's requests only. Of engines that
# report them, `metrics.engines` has the true ones.
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


# Samples that the plain format writes behind all others of their family.
_LAST_SUFFIXES = ("_created", "_gsum", "_gcount")
# The page of a large fleet takes a tenth of a second, on the loop that streams tokens. After so
# long, the tokens have their turn.
_TURN_S = 0.002
# Samples that are written without a look at the clock: about a millisecond.
_PIECE_SAMPLES = 100


async def render_metrics(
    registries: Iterable[CollectorRegistry],
    gateway_id: str | None = None,
    accept: str = "",
    ours: Iterable[CollectorRegistry] = (),
) -> tuple[bytes, str]:
    """Returns the page and its content type. `gateway_id` is `None` if nothing needs the label.

    The families of a single engine are left out of `registries`; nothing is left out of `ours`.
    `accept` is the reader's HTTP `Accept` header. If it names OpenMetrics, the page is in that
    format and its histograms carry exemplars, which Prometheus' own text format has no place for.

    Other tasks run in between. So a collector has to read all that it shows before it yields its
    first family; two collectors may show two moments, a few milliseconds apart.
    """
    turns = _Turns()
    families = await _merged(registries, ours, turns)
    labels = {} if gateway_id is None else {GATEWAY_LABEL: gateway_id}
    is_open = _OPEN_METRICS in accept.lower()
    page = []
    for family in families:
        for number, piece in enumerate(_pieces(family)):
            text = _write(piece, labels, is_open=is_open)
            page.append(text if number == 0 else _without_head(text))
            await turns.give()
    if is_open:
        return b"".join([*page, b"# EOF\n"]), openmetrics.CONTENT_TYPE_LATEST
    return b"".join(page), CONTENT_TYPE_LATEST


class _Turns:
    """Lets other tasks run, when they have waited for long enough."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since_s = self._loop.time()

    async def give(self) -> None:
        """Lets all others run, if it is time."""
        if self._loop.time() - self._since_s > _TURN_S:
            await asyncio.sleep(0)
            self._since_s = self._loop.time()


class _Written(Collector):
    """Wraps one family for a writer that wants a registry."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


async def _merged(
    registries: Iterable[CollectorRegistry], ours: Iterable[CollectorRegistry], turns: _Turns
) -> Iterable[Metric]:
    """Returns each family once, with its samples from all registries."""
    families: dict[str, Metric] = {}
    sources = [(registry, _SCHEDULER_FAMILIES) for registry in registries]
    sources += [(registry, frozenset()) for registry in ours]
    for registry, left_out in sources:
        for family in registry.collect():
            if family.name not in left_out:
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
            await turns.give()
    return families.values()


def _pieces(family: Metric) -> Iterator[Metric]:
    """Yields the family in parts that are short to write, or whole if it cannot be divided."""
    last = tuple(family.name + suffix for suffix in _LAST_SUFFIXES)
    if any(sample.name in last for sample in family.samples):
        yield family
        return
    for start in range(0, len(family.samples) or 1, _PIECE_SAMPLES):
        piece = copy(family)
        piece.samples = family.samples[start : start + _PIECE_SAMPLES]
        yield piece


def _write(family: Metric, labels: dict[str, str], *, is_open: bool) -> bytes:
    written = copy(family)
    written.samples = [sample._replace(labels=labels | sample.labels) for sample in family.samples]
    if not is_open:
        return generate_latest(_Written(written))
    # Other ways of escaping turn the colon of vLLM's names into `_` (prometheus-client 0.26).
    write: Callable[..., bytes] = openmetrics.generate_latest
    return write(_Written(written), openmetrics.ALLOWUTF8).removesuffix(b"# EOF\n")


def _without_head(text: bytes) -> bytes:
    """Returns only the samples, whose lines never begin with `#`."""
    return b"\n".join(line for line in text.split(b"\n") if not line.startswith(b"#"))
