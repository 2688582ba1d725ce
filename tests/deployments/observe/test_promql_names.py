"""Every metric, label and closed value in rules, dashboards, runbooks and docs exists."""

import re
from collections.abc import Mapping

import pytest
from promql import Matcher, PromqlError, Reads, Selector, reads
from shipped import (
    PROMQL_BLOCK,
    ROOT,
    Query,
    dashboard_queries,
    filled,
    rule_queries,
    rules,
    text_queries,
)
from vocabulary import CLOSED, PROMETHEUS_OWN, TARGET_LABELS

from serving.gateway.telemetry.request_metrics import ClassMetrics, Histogram
from serving.telemetry.metric_names import ALL, Kind, labels_of

_HISTOGRAM = re.compile(r"_(bucket|count|sum)$")


def recorded() -> dict[str, frozenset[str]]:
    """The recorded series by name, with every label that they may have: those of what they read,
    narrowed by nothing, and the rule's own."""
    known: dict[str, frozenset[str]] = {}
    for _ in range(3):  # one rule reads another
        for rule in rules("record"):
            labels = frozenset(rule.get("labels", {}))
            for selector in reads(rule["expr"]).selectors:
                labels |= series_labels(selector.metric, known) or frozenset()
            known[rule["record"]] = known.get(rule["record"], frozenset()) | labels
    return known


def series_labels(name: str, others: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    """The labels that a series of this name may have; `None`: there is none."""
    if name in others:
        return others[name]
    if name in PROMETHEUS_OWN:
        return TARGET_LABELS
    stem = _HISTOGRAM.sub("", name)
    metric = ALL.get(name) or ALL.get(stem)
    if metric is None or (metric.kind == Kind.HISTOGRAM) != (stem != name):
        return None
    bucket = {"le"} if name.endswith("_bucket") else set()
    return frozenset(labels_of(metric)) | TARGET_LABELS | bucket


def problems(query: Query, others: Mapping[str, frozenset[str]]) -> list[str]:
    """What the query names that does not exist."""
    found, every = [], set()
    named = reads(filled(query.expression))
    for selector in named.selectors:
        labels = series_labels(selector.metric, others)
        if labels is None:
            found.append(f"{query.place}: no series {selector.metric}")
            continue
        every |= labels
        for matcher in selector.matchers:
            found += [f"{query.place}: {word}" for word in _wrong(selector, matcher, labels)]
    unknown = named.grouped_by - every
    return found + [f"{query.place}: nothing in it has the label {each}" for each in unknown]


def _wrong(selector: Selector, matcher: Matcher, labels: frozenset[str]) -> list[str]:
    if matcher.label not in labels:
        return [f"{selector.metric} has no label {matcher.label}"]
    allowed = CLOSED.get(selector.metric, {}).get(matcher.label)
    if matcher.label == "le":
        allowed = bounds_of(selector.metric)
    if allowed is None:
        return []
    wrong = set(matcher.values) - allowed - {"", ".+"}
    return [f"{selector.metric} never has {matcher.label}={each}" for each in sorted(wrong)]


def bounds_of(bucket: str) -> set[str] | None:
    """The bounds of one of the gateways' histograms as they stand on the page."""
    stem = bucket.removeprefix("slicewise_").removesuffix("_seconds_bucket")
    numbers = ClassMetrics()
    renamed = {
        "time_to_first_token": numbers.to_first_token,
        "time_per_output_token": numbers.per_output_token,
    }
    histogram = renamed.get(stem) or getattr(numbers, stem, None)
    if not isinstance(histogram, Histogram):
        return None
    return {f"{float(bound)}" for bound in histogram.bounds} | {"+Inf"}


@pytest.mark.parametrize(
    "queries",
    [
        pytest.param(rule_queries, id="rules"),
        pytest.param(dashboard_queries, id="dashboards"),
        pytest.param(text_queries, id="docs"),
    ],
)
def test_everything_that_a_query_names_exists(queries: object) -> None:
    assert callable(queries)
    asked, others = queries(), recorded()
    assert len(asked) > 10
    assert [problem for query in asked for problem in problems(query, others)] == []


def test_every_recorded_series_is_read() -> None:
    queries = (*rule_queries(), *dashboard_queries(), *text_queries())
    read = {
        selector.metric
        for query in queries
        for selector in reads(filled(query.expression)).selectors
    }
    assert set(recorded()) - read == set()


def test_no_query_turns_missing_into_zero() -> None:
    queries = (*rule_queries(), *dashboard_queries())
    pattern = re.compile(r"or\s+(on\s*\(\)\s*)?vector\(")
    assert [query.place for query in queries if pattern.search(query.expression)] == []


def test_runbooks_and_docs_have_no_query_outside_of_a_promql_block() -> None:
    """A fence without a language would hide its queries from this test."""
    for path in sorted((ROOT / "docs/operate/runbooks").glob("*.md")):
        rest = PROMQL_BLOCK.sub("", path.read_text())
        assert not re.search(r"```\n[^`]*(slicewise|tpu)_\w+", rest), path.name


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("slicewise_output_token_total", "no series slicewise_output_token_total"),
        ("slicewise_time_to_first_token_seconds", "no series"),
        ('rate(slicewise_links{stat="ready"}[5m])', "has no label stat"),
        ('slicewise_links{state="redy"}', "never has state=redy"),
        ('tpu_hbm_used_bytes{slice=~"$slice"} + on (slcie) tpu_hbm_capacity_bytes', "slcie"),
        ('slicewise_time_to_first_token_seconds_bucket{le="2"}', "never has le=2"),
        ('slicewise_sequences_total{outcome=~"stop|stopped"}', "never has outcome=stopped"),
    ],
)
def test_what_does_not_exist_is_found(expression: str, words: str) -> None:
    found = problems(Query("here", expression), recorded())
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a", Reads([Selector("a")])),
        ("sum by (x, y) (rate(a:b{c='d, e}'}[5m] offset 1h30m))", None),
        (
            'a{b!~"c|d", e="f"} unless on (g) max(h) without (i)',
            Reads(
                [
                    Selector("a", (Matcher("b", "!~", "c|d"), Matcher("e", "=", "f"))),
                    Selector("h"),
                ],
                {"g", "i"},
            ),
        ),
        ("count # of\n (sum == bool 1e3)", Reads([Selector("sum")])),
        ("histogram_quantile(0.9, a) / -b ^ 0x1f", Reads([Selector("a"), Selector("b")])),
        ("max_over_time(a[1h:5m]) and b == inf", Reads([Selector("a"), Selector("b")])),
    ],
)
def test_names_are_found_wherever_they_stand(expression: str, expected: Reads | None) -> None:
    expected = expected or Reads([Selector("a:b", (Matcher("c", "=", "d, e}"),))], {"x", "y"})
    assert reads(expression) == expected


@pytest.mark.parametrize("expression", ['a{b="c}', "a{b}", '{b="c"}', "a ~ b"])
def test_what_is_no_promql_is_refused(expression: str) -> None:
    with pytest.raises(PromqlError):
        reads(expression)
