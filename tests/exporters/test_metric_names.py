"""The registry keeps its own rules, and what is decoded is in it."""

import re

import pytest

from serving.exporters.identity import read_identity, runtime_targets
from serving.exporters.libtpu_service.metric_table import RULES, Form
from serving.telemetry.metric_names import (
    ALL,
    BATCHES,
    CONDITIONS,
    ENGINE_STEPS,
    ENGINES,
    GATEWAY_LOOP,
    LEDGER,
    LINKS,
    PLANS,
    PROGRAMS,
    PROVISIONING,
    QUOTAS,
    SERVING_COUNTS,
    SERVING_LATENCY,
    SLICES,
    TPU_CHIPS,
    TPU_DCN,
    TPU_EXPORTER,
    TPU_HOST,
    TRACES,
    VLLM_ENGINES,
    Kind,
    Scope,
    Unit,
    labels_of,
)

GROUPS = (
    *(*TPU_CHIPS, *TPU_HOST, *TPU_DCN, *TPU_EXPORTER),
    *(*GATEWAY_LOOP, *TRACES, *BATCHES),
    *(
        *SERVING_LATENCY,
        *SERVING_COUNTS,
        *QUOTAS,
        *ENGINES,
        *VLLM_ENGINES,
        *ENGINE_STEPS,
        *PROGRAMS,
        *LINKS,
        *LEDGER,
        *SLICES,
        *PLANS,
        *PROVISIONING,
        *CONDITIONS,
    ),
)


def test_no_name_is_there_twice() -> None:
    assert len(GROUPS) == len(ALL)


@pytest.mark.parametrize("name", sorted(ALL))
def test_name_labels_and_help_follow_prometheus(name: str) -> None:
    metric = ALL[name]
    if name.startswith("vllm:"):
        return  # vLLM named it, by other habits
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
    assert name.endswith("_total") == (metric.kind == Kind.COUNTER)
    stem = name.removesuffix("_total")
    if metric.unit == Unit.BYTES and metric.kind == Kind.COUNTER:
        assert "_bytes" in stem
    elif metric.unit not in (Unit.COUNT, Unit.FLAG):
        assert stem.endswith(f"_{metric.unit}")
    labels = labels_of(metric)
    assert len(set(labels)) == len(labels)
    assert not {"le", "quantile", "job", "instance"} & set(labels)
    assert metric.help
    assert not metric.help.endswith(".")
    assert metric.max_sets >= 1


@pytest.mark.parametrize("theirs", sorted(RULES))
def test_every_rule_fits_the_metric_that_it_makes(theirs: str) -> None:
    rule = RULES[theirs]
    metric = ALL[rule.metric]
    is_histogram = rule.form in (Form.ORDINAL_HISTOGRAM, Form.HOST_HISTOGRAM)
    assert (metric.kind == Kind.HISTOGRAM) == is_histogram
    assert (metric.kind == Kind.COUNTER) == (rule.form == Form.HOST_COUNTER)
    by_device = rule.form in (Form.DEVICE_GAUGE, Form.ORDINAL_GAUGE, Form.ORDINAL_HISTOGRAM)
    assert (metric.scope == Scope.DEVICE) == by_device
    assert tuple(rule.labels.values()) == metric.labels


def test_identity_takes_the_first_name_that_is_set() -> None:
    identity = read_identity({"TPU_NAME": "a", "SLICEWISE_SLICE": "b", "HOSTNAME": "h"})
    assert (identity["slice"], identity["node"], identity["topology"]) == ("b", "h", "")


def test_runtime_ports_come_from_the_environment() -> None:
    assert runtime_targets({}) == ("127.0.0.1:8431",)
    ports = {"TPU_RUNTIME_METRICS_PORTS": "8431,8432"}
    assert runtime_targets(ports) == ("127.0.0.1:8431", "127.0.0.1:8432")
    with pytest.raises(ValueError, match="value '0'"):
        runtime_targets({"TPU_RUNTIME_METRICS_PORTS": "0"})
