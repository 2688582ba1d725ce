"""What Slicewise adds to a token, with an engine whose times are known because we set them."""

from dataclasses import dataclass

from benchmarks.load import Load, Result, run_load
from benchmarks.servers import MODEL, Server, cpu_s, paced, slicewise

# As slow as a slice that serves a large model: 50 ms to the first token, then 20 ms for each.
TTFT_MS, TPOT_MS = 50.0, 20.0
LOADS = (
    Load(num_streams=1, num_requests=8, max_tokens=64),
    Load(num_streams=32, num_requests=128, max_tokens=64),
    Load(num_streams=256, num_requests=512, max_tokens=64),
)


@dataclass(frozen=True, slots=True)
class Overhead:
    """One load: what the client saw, and CPU microseconds per token by process."""

    load: Load
    result: Result
    cpu_us_per_token: dict[str, float]


async def _measure(server: Server, load: Load) -> Overhead:
    processes = server.processes()
    before = cpu_s(processes)
    result = await run_load(server.url, MODEL, load, seed=load.num_streams)
    after = cpu_s(processes)
    used = {role: (after[role] - before[role]) / result.num_tokens * 1e6 for role in after}
    return Overhead(load, result, used)


async def run() -> list[Overhead]:
    """All loads against one paced engine, after a warm-up."""
    with slicewise(paced(TTFT_MS, TPOT_MS)) as server:
        await run_load(server.url, MODEL, Load(32, 64, max_tokens=16), seed=0)
        return [await _measure(server, load) for load in LOADS]


def report(rows: list[Overhead]) -> str:
    """A markdown table."""
    lines = [
        "| streams | added TTFT p50 / p99 ms | added TPOT p50 / p99 ms | gateway µs/token "
        "| engine host µs/token | HAProxy µs/token |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        seen, used = row.result, row.cpu_us_per_token
        ttft = [seen.ttft_ms(percentile) - TTFT_MS for percentile in (50, 99)]
        tpot = [seen.tpot_ms(percentile) - TPOT_MS for percentile in (50, 99)]
        lines.append(
            f"| {row.load.num_streams} | {ttft[0]:.1f} / {ttft[1]:.1f} "
            f"| {tpot[0]:.2f} / {tpot[1]:.2f} | {used.get('gateway', 0):.0f} "
            f"| {used.get('engine host', 0):.0f} | {used.get('HAProxy', 0):.0f} |"
        )
    return "\n".join(lines)
