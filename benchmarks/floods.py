"""What a tenant that floods costs two others, in simulated time: the table of ADR 28."""

from collections.abc import Callable

from tests.gateway.dispatch.floods import APART, AT_ANY, AT_ONE, beside_a_flood
from tests.gateway.dispatch.simulated_fleet import quantile

# The settings were chosen on the first two.
SEEDS = (4, 104, 204, 304, 404)
_FLOODS = {None: "alone", 500: "beside prompts of 500 tokens", 4000: "of 4,000 tokens"}
HEAD = f"| tenants ask | {' | '.join(_FLOODS.values())} |\n|---|{'---|' * len(_FLOODS)}"


def rows(tell: Callable[[str], None]) -> None:
    """Tells each row: p50 / p90 / p99 of the others in ms, the least and most of all runs."""
    for kind in (AT_ONE, AT_ANY, APART):
        cells = [_cell(kind, flood_tokens) for flood_tokens in _FLOODS]
        tell(f"| {kind} | {' | '.join(cells)} |")


def _cell(kind: str, flood_tokens: int | None) -> str:
    runs = [beside_a_flood(kind, flood_tokens, seed)[0] for seed in SEEDS]
    spans = []
    for share in (0.5, 0.9, 0.99):
        found_ms = sorted(round(1000 * quantile(others, share)) for others in runs)
        spans.append(f"{found_ms[0]:,} to {found_ms[-1]:,}")
    return " / ".join(spans)
