"""What clients report of a run, and what the golden server knows of it, in the same terms. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from loadtest.scorecard.spread import spread_of

Pair = tuple[float, float]  # p50 and p99


@dataclass(frozen=True, slots=True)
class Truth:
    """What the golden server did, of the requests that a client judged. Milliseconds.

    `steady_tokens_per_s` are the tokens it wrote between the first and the last arrival,
    `whole_tokens_per_s` all tokens of those requests from the first arrival to the last token.
    """

    ttft_ms: Pair
    tpot_ms: Pair
    e2e_ms: Pair
    steady_tokens_per_s: float
    whole_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What a client says of one run. Milliseconds.

    `tpot_ms` is the figure of that definition, whatever the client calls it. `queue_p99_ms` is the
    client's own delay of a send, as far as it tells. `mixed_tpot_ms` is guidellm's "TPOT", which
    has the first token in it; `None` of the others. `fault` is what a client says against itself.
    """

    requests: int
    failed: int
    input_tokens: float
    ttft_ms: Pair
    tpot_ms: Pair
    e2e_ms: Pair
    tokens_per_s: float
    queue_p99_ms: float
    mixed_tpot_ms: Pair | None = None
    fault: str | None = None


def read_slicewise(card: Mapping[str, Any]) -> Figures:
    """What a scorecard of ours says.

    Raises:
        RuntimeError: no answer was whole, so that it says nothing.
    """
    if not card["requests"]["ok"]:
        raise RuntimeError(f"no whole answer: {card['requests']['errors']}")
    return Figures(
        requests=card["requests"]["ok"],
        failed=card["requests"]["failed"],
        input_tokens=card["tokens"]["input"] / card["requests"]["ok"],
        ttft_ms=_ms(card["ttft_s"]),
        tpot_ms=_ms(card["tpot_s"]),
        e2e_ms=_ms(card["e2e_s"]),
        tokens_per_s=card["throughput"]["output_tokens_per_s"],
        queue_p99_ms=card["schedule_lag_s"]["p99"] * 1e3,
        fault=None if card["client"]["valid"] else "; ".join(card["client"]["reasons"]),
    )


def read_vllm(result: Mapping[str, Any]) -> Figures:
    """What a result of `vllm bench serve` says."""
    return Figures(
        requests=result["completed"],
        failed=result["failed"],
        input_tokens=result["total_input_tokens"] / result["completed"],
        ttft_ms=(result["p50_ttft_ms"], result["p99_ttft_ms"]),
        tpot_ms=(result["p50_tpot_ms"], result["p99_tpot_ms"]),
        e2e_ms=(result["p50_e2el_ms"], result["p99_e2el_ms"]),
        tokens_per_s=result["output_throughput"],
        queue_p99_ms=_spread_ms(each * 1e9 for each in result["queue_times"])[1],
    )


def read_guidellm(report: Mapping[str, Any]) -> Figures:
    """What a report of guidellm says; its ITL, of whole requests, is the TPOT of others."""
    (benchmark,) = report["benchmarks"]
    metrics = {
        name: metric["successful"]
        for name, metric in benchmark["metrics"].items()
        if isinstance(metric, dict) and metric.get("successful")
    }

    def pair(name: str, scale: float = 1.0) -> Pair:
        points = metrics[name]["percentiles"]
        return points["p50"] * scale, points["p99"] * scale

    return Figures(
        requests=benchmark["metrics"]["request_totals"]["successful"],
        failed=benchmark["metrics"]["request_totals"]["errored"],
        input_tokens=metrics["prompt_token_count"]["mean"],
        ttft_ms=pair("time_to_first_token_ms"),
        tpot_ms=pair("inter_token_latency_ms"),
        e2e_ms=pair("request_latency", 1e3),
        tokens_per_s=metrics["output_tokens_per_second"]["mean"],
        queue_p99_ms=pair("request_dispatch_delay", 1e3)[1],
        mixed_tpot_ms=pair("time_per_output_token_ms"),
    )


def truth_of(requests: Mapping[str, Mapping[str, Any]], num_judged: int) -> Truth:
    """Of the last `num_judged` requests to arrive; all clients judge those after their warm-up."""
    ordered = sorted(requests.values(), key=lambda each: each["received_ns"])
    judged = ordered[-num_judged:]
    first_ns, last_ns = judged[0]["received_ns"], judged[-1]["received_ns"]
    written = [each["written_ns"] for each in judged]
    in_window = sum(first_ns < at_ns <= last_ns for each in ordered for at_ns in each["written_ns"])
    whole_ns = max(each[-1] for each in written) - first_ns
    return Truth(
        ttft_ms=_spread_ms(each["written_ns"][0] - each["received_ns"] for each in judged),
        tpot_ms=_spread_ms((each[-1] - each[0]) / (len(each) - 1) for each in written),
        e2e_ms=_spread_ms(each["written_ns"][-1] - each["received_ns"] for each in judged),
        steady_tokens_per_s=in_window / (last_ns - first_ns) * 1e9,
        whole_tokens_per_s=sum(map(len, written)) / whole_ns * 1e9,
    )


def _spread_ms(values_ns: Iterable[float]) -> Pair:
    spread = spread_of(value / 1e6 for value in values_ns)
    assert spread.p50 is not None, "a client judged at least one request"
    assert spread.p99 is not None
    return spread.p50, spread.p99


def _ms(spread_s: Mapping[str, float]) -> Pair:
    return spread_s["p50"] * 1e3, spread_s["p99"] * 1e3
