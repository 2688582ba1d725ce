"""Slicewise against vLLM's own server: the same engine, the same arguments, in turns."""

import statistics
from dataclasses import dataclass

from benchmarks.load import Load, Result, run_load
from benchmarks.servers import MODEL, Server, slicewise, vllm_model, vllm_server
from serving.artifacts.model_source import resolve_source

SOURCE = "models/slicewise-demo"
ENGINE_ARGS = {
    "max_model_len": 2048,
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.1,
}
ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
LOADS = (
    Load(num_streams=1, num_requests=24),
    Load(num_streams=8, num_requests=96),
    Load(num_streams=32, num_requests=256),
)
# In turns, because the machine is shared and its speed drifts; the first pair is warm-up.
NUM_PAIRS = 5


@dataclass(frozen=True, slots=True)
class Pair:
    """One load, run against both servers one after the other."""

    ours: Result
    theirs: Result

    @property
    def throughput_ratio(self) -> float:
        """Output tokens per second, ours over theirs."""
        return self.ours.tokens_per_s / self.theirs.tokens_per_s

    @property
    def added_ttft_ms(self) -> float:
        """Median time to first token, ours less theirs."""
        return self.ours.ttft_ms() - self.theirs.ttft_ms()


async def _pair(ours: Server, theirs: Server, load: Load, turn: int) -> Pair:
    servers = [ours, theirs] if turn % 2 == 0 else [theirs, ours]
    results = {}
    for server in servers:
        seed = turn * 1000 + load.num_streams
        results[server.name] = await run_load(server.url, MODEL, load, seed=seed)
    return Pair(results[ours.name], results[theirs.name])


async def run() -> dict[Load, list[Pair]]:
    """All pairs of all loads; both servers are up all the time, one of them idle."""
    model = vllm_model(ENGINE_ARGS, ENGINE_ENV)
    source = resolve_source(SOURCE)
    with slicewise(model) as ours, vllm_server(source, ENGINE_ARGS, ENGINE_ENV) as theirs:
        pairs: dict[Load, list[Pair]] = {load: [] for load in LOADS}
        for turn in range(NUM_PAIRS + 1):
            for load in LOADS:
                pair = await _pair(ours, theirs, load, turn)
                if turn > 0:
                    pairs[load].append(pair)
    return pairs


def report(pairs: dict[Load, list[Pair]]) -> str:
    """A markdown table; medians over the pairs, with the range."""
    lines = [
        "| streams | tok/s, ours | tok/s, vLLM's server | throughput ratio "
        "| TTFT p50 ms, ours | TTFT p50 ms, vLLM's | added TTFT p50 ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for load, rows in pairs.items():
        ratio = [row.throughput_ratio for row in rows]
        added = [row.added_ttft_ms for row in rows]
        lines.append(
            f"| {load.num_streams} "
            f"| {statistics.median(row.ours.tokens_per_s for row in rows):.0f} "
            f"| {statistics.median(row.theirs.tokens_per_s for row in rows):.0f} "
            f"| {statistics.median(ratio):.2f} ({min(ratio):.2f} to {max(ratio):.2f}) "
            f"| {statistics.median(row.ours.ttft_ms() for row in rows):.1f} "
            f"| {statistics.median(row.theirs.ttft_ms() for row in rows):.1f} "
            f"| {statistics.median(added):+.1f} ({min(added):+.1f} to {max(added):+.1f}) |"
        )
    return "\n".join(lines)
