"""A real Prometheus answers every query that we ship, with data."""

import time
from collections.abc import Callable, Iterator

import pytest
from observing import Observing
from promql import Matcher, Selector, reads
from scaled import write_scaled
from shipped import dashboard_queries, filled, rule_queries, rules, text_queries
from staged_page import StagedPages

pytestmark = [
    pytest.mark.process,
    pytest.mark.needs("prometheus"),
]

DEADLINE_S = 60.0
# Jobs of a cluster, which the configuration of a laptop does not have. Their alerts are made to
# fire in `tests/control_plane/test_alerts_fire.py`.
ONLY_ON_A_CLUSTER = ('job="slice-provisioner"', 'node_type="head"')


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observing]:
    folder = tmp_path_factory.mktemp("live")
    with StagedPages() as pages:
        arguments = [
            *("--gateway", f"http://{pages.address}/gateway", "--tpu-exporter", pages.address),
            *("--config-dir", str(write_scaled(folder / "rules")), "--scrape-interval", "1"),
            *("--ray-discovery", str(folder / "none.json")),
        ]
        with Observing(folder / "tmp", arguments) as observing:
            yield observing


def wait_until_none(find: Callable[[], list[str]]) -> None:
    """Waits until nothing is found any more: rates need scrapes, rules need rates."""
    deadline_s = time.monotonic() + DEADLINE_S
    while found := find():
        assert time.monotonic() < deadline_s, found
        time.sleep(0.5)


def selector(each: Selector) -> str:
    def matcher(one: Matcher) -> str:
        return f'{one.label}{one.sign}"{one.text}"'

    return f"last_over_time({each.metric}{{{','.join(map(matcher, each.matchers))}}}[1m])"


def test_every_query_of_the_dashboards_and_every_recorded_series_has_data(
    prometheus: Observing,
) -> None:
    asked = {query.place: filled(query.expression) for query in dashboard_queries()}
    asked |= {rule["record"]: rule["record"] for rule in rules("record")}
    wait_until_none(
        lambda: [place for place, query in asked.items() if not prometheus.query(query)]
    )


def test_every_series_that_alerts_and_runbooks_read_has_data(prometheus: Observing) -> None:
    """The comparisons themselves are empty while nothing is wrong, and must not be an error."""
    queries = [*rule_queries(), *text_queries()]
    for query in queries:
        prometheus.query(filled(query.expression))
    asked = {
        text
        for query in queries
        for each in reads(filled(query.expression)).selectors
        if not any(part in (text := selector(each)) for part in ONLY_ON_A_CLUSTER)
    }
    wait_until_none(lambda: [query for query in sorted(asked) if not prometheus.query(query)])


def test_no_rule_fails(prometheus: Observing) -> None:
    groups = prometheus.get("rules")["groups"]
    failed = [rule for group in groups for rule in group["rules"] if rule["health"] == "err"]
    assert [(rule["name"], rule["lastError"]) for rule in failed] == []
    assert sum(len(group["rules"]) for group in groups) == len(rules("alert")) + len(
        rules("record")
    )
