"""How API keys are written, and that they never show."""

import hashlib
import json
import re

import pytest
import yaml

from serving.config.api_keys import KeyRecord, KeyScope, ModelRoute, read_keys
from serving.config.application import OpenField
from serving.domain.models.request_fields.service_class import ServiceTier
from serving.domain.usage.quotas import Period, Quota, QuotaKind


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("", []),
        ("a", [(None, "a")]),
        ("a,b", [(None, "a"), (None, "b")]),
        ("a\n\n  b  \n", [(None, "a"), (None, "b")]),
        ("# rotated in May\na, b\n# c\n", [(None, "a"), (None, "b")]),
        (" , ,\n", []),
        ("acme a\nacme  b\nc", [("acme", "a"), ("acme", "b"), (None, "c")]),
        ("acme a, team-2 b", [("acme", "a"), ("team-2", "b")]),
    ],
)
def test_keys_are_read_by_line_and_by_comma_with_their_tenants(
    text: str, keys: list[tuple[str | None, str]]
) -> None:
    assert [(key.tenant, key.key) for key in read_keys(text)] == keys


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("a b secret", "not 3"), ("-a secret", "letters, digits"), (f"{'t' * 64} secret", "63")],
)
def test_what_is_no_key_is_refused_without_being_shown(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refusal:
        read_keys(text)
    assert "secret" not in str(refusal.value)


def test_named_key_does_not_show_in_its_representation() -> None:
    assert "secret" not in repr(read_keys("acme very-secret"))


RECORDS = f"""
# rotated in May
keys:
  - name: acme-ci
    key: k1
    tenant: acme
    models: [chat, chat-sql]
    routes: [/v1/chat/completions]
    open_fields: [priority]
    expires_at: 2027-01-01T00:00:00Z
    weight: 2.5
    service_tiers: [priority, flex]
    quotas:
      - {{requests: 600, per: minute}}
      - {{tokens: 5000000, per: day, models: [chat-sql, chat]}}
      - {{usd: 12.5, per: day}}
      - {{chip_seconds: 3600, per: hour}}
      - {{concurrent: 32}}
  - {{name: prometheus, sha256: "{hashlib.sha256(b"k2").hexdigest()}", scopes: [metrics]}}
  - {{name: open, key: k3, scopes: [inference, fleet, metrics]}}
"""


@pytest.mark.parametrize("text", [RECORDS, json.dumps(yaml.safe_load(RECORDS), default=str)])
def test_record_says_what_a_key_may_do(text: str) -> None:
    limited, metrics, everything = read_keys(text)
    assert limited == KeyRecord(
        hashlib.sha256(b"k1").digest(),
        "k1",
        name="acme-ci",
        tenant="acme",
        scopes=frozenset({KeyScope.INFERENCE}),
        models=frozenset({"chat", "chat-sql"}),
        routes=frozenset({ModelRoute.CHAT_COMPLETIONS}),
        open_fields=frozenset({OpenField.PRIORITY}),
        expires_at_s=1798761600.0,
        weight=2.5,
        service_tiers=frozenset({ServiceTier.PRIORITY, ServiceTier.FLEX}),
        quotas=(
            Quota(QuotaKind.REQUESTS, 600, Period.MINUTE),
            Quota(QuotaKind.TOKENS, 5_000_000, Period.DAY, frozenset({"chat", "chat-sql"})),
            Quota(QuotaKind.USD, 12.5, Period.DAY),
            Quota(QuotaKind.CHIP_SECONDS, 3600, Period.HOUR),
            Quota(QuotaKind.CONCURRENT, 32),
        ),
    )
    usual = frozenset({ServiceTier.DEFAULT, ServiceTier.FLEX})
    assert metrics == KeyRecord(
        hashlib.sha256(b"k2").digest(),
        name="prometheus",
        scopes=frozenset({KeyScope.METRICS}),
        service_tiers=usual,
    )
    assert everything.scopes == frozenset(KeyScope)
    assert everything.service_tiers == usual


def test_plain_key_may_do_everything_for_ever() -> None:
    (record,) = read_keys("acme k1")
    assert record.scopes == frozenset(KeyScope)
    assert (record.models, record.routes, record.expires_at_s) == (None, None, None)
    assert record.weight == 1.0
    assert record.service_tiers == frozenset(ServiceTier)


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"key": "secret"}, "keys[0].name: missing; required: a string, letters, digits"),
        ({"name": "a b", "key": "secret"}, "keys[0].name: not allowed; allowed: a string, letters"),
        ({"name": "a"}, "keys[0].key: missing; allowed: either key or sha256"),
        (
            {"name": "a", "key": "secret", "sha256": "0" * 64},
            "keys[0].key: sha256 is given as well; allowed: either key or sha256",
        ),
        ({"name": "a", "key": "my secret"}, "keys[0].key: not allowed; allowed: a string or null"),
        ({"name": "a", "key": 4711}, "keys[0].key: not allowed"),
        ({"name": "a", "sha256": "secret"}, "keys[0].sha256: not allowed"),
        ({"name": "a", "key": "secret", "modles": ["m"]}, "did you mean 'models'?"),
        (
            {"name": "a", "key": "secret", "scopes": ["admin"]},
            'keys[0].scopes[0]: not allowed (value "admin"); allowed: one of inference, metrics',
        ),
        ({"name": "a", "key": "secret", "scopes": []}, "keys[0].scopes: not allowed"),
        (
            {"name": "a", "key": "secret", "routes": ["/v1/models"]},
            'keys[0].routes[0]: not allowed (value "/v1/models"); allowed: one of /v1/chat/',
        ),
        (
            {"name": "a", "key": "secret", "scopes": ["metrics"], "models": ["m"]},
            "keys[0].models: without effect, because the key is not for inference",
        ),
        (
            {"name": "a", "key": "secret", "open_fields": ["seed"]},
            'keys[0].open_fields[0]: not allowed (value "seed"); allowed: one of vllm_xargs',
        ),
        (
            {"name": "a", "key": "secret", "service_tiers": ["gold"]},
            'keys[0].service_tiers[0]: not allowed (value "gold"); allowed: one of priority, '
            "default, flex",
        ),
        (
            {"name": "a", "key": "secret", "weight": 0},
            "keys[0].weight: not allowed (value 0); allowed: a number",
        ),
        ({"name": "a", "key": "secret", "expires_at": 2027}, "a time with its zone"),
        ({"name": "a", "key": "secret", "expires_at": "2027-01-01"}, "a time with its zone"),
        ({"name": "a", "key": "secret", "expires_at": "2027-01-01T00:00"}, "a time with its zone"),
    ],
)
def test_record_of_another_form_is_refused_by_field_without_showing_a_key(
    record: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)) as refusal:
        read_keys(json.dumps({"keys": [record]}))
    assert "secret" not in str(refusal.value)
    assert "4711" not in str(refusal.value)


def test_two_records_of_one_name_or_of_one_key_are_refused() -> None:
    of_key = {"name": "b", "sha256": hashlib.sha256(b"secret").hexdigest()}
    records = [{"name": "a", "key": "secret"}, {"name": "a", "key": "other"}, of_key]
    with pytest.raises(ValueError, match="already") as refusal:
        read_keys(json.dumps({"keys": records}))
    assert "keys[1].name: already the name of keys[0]" in str(refusal.value)
    assert "keys[2].key: already the key of keys[0]" in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_keys_of_one_tenant_have_one_weight() -> None:
    records = [
        {"name": "a", "key": "secret", "tenant": "acme", "weight": 2},
        {"name": "b", "key": "other", "tenant": "acme"},
        {"name": "c", "key": "third", "tenant": "zeta"},
        {"name": "m", "key": "fourth", "tenant": "acme", "scopes": ["metrics"]},
    ]
    with pytest.raises(ValueError, match="weight") as refusal:
        read_keys(json.dumps({"keys": records}))
    assert str(refusal.value) == (
        "keys[1].weight: another one than that of keys[0], of the same tenant (value 1.0); "
        "allowed: 2"
    )


QUOTA = {"requests": 5, "per": "hour"}


@pytest.mark.parametrize(
    ("quotas", "complaint"),
    [
        ([{"per": "hour"}], "keys[0].quotas[0]: no amount; allowed: exactly one of requests, tok"),
        ([QUOTA | {"tokens": 5}], "keys[0].quotas[0]: several amounts; allowed: exactly one of"),
        ([{"requests": 5}], "keys[0].quotas[0].per: missing; allowed: minute, hour, day"),
        (
            [{"concurrent": 5, "per": "day"}],
            "keys[0].quotas[0].per: without effect with concurrent; allowed: left out",
        ),
        ([QUOTA | {"per": "week"}], 'per: not allowed (value "week"); allowed: one of minute, hou'),
        ([{"requests": 0, "per": "day"}], "quotas[0].requests: not allowed (value 0); allowed"),
        ([{"requests": 1.5, "per": "day"}], "quotas[0].requests: not allowed (value 1.5)"),
        ([{"usd": -1, "per": "day"}], "quotas[0].usd: not allowed (value -1)"),
        ([QUOTA | {"models": []}], "quotas[0].models: not allowed"),
        (
            [QUOTA, QUOTA | {"requests": 6}],
            "keys[0].quotas[1]: bounds what keys[0].quotas[0] bounds; allowed: one amount",
        ),
    ],
)
def test_quota_of_another_form_is_refused_by_field(
    quotas: list[dict[str, object]], complaint: str
) -> None:
    record = {"name": "a", "key": "secret", "tenant": "acme", "quotas": quotas}
    with pytest.raises(ValueError, match=re.escape(complaint)) as refusal:
        read_keys(json.dumps({"keys": [record]}))
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("changes", [{"tenant": None}, {"scopes": ["metrics"]}])
def test_quotas_are_of_tenants_that_ask_models(changes: dict[str, object]) -> None:
    record = {"name": "a", "key": "secret", "tenant": "acme", "quotas": [QUOTA]} | changes
    with pytest.raises(ValueError, match=r"keys\[0\].quotas: without effect; allowed: only with a"):
        read_keys(json.dumps({"keys": [record]}))


def test_keys_of_one_tenant_have_the_same_quotas_in_any_order() -> None:
    more = {"tokens": 5, "per": "day"}
    keys = [
        {"name": "a", "key": "k1", "tenant": "acme", "quotas": [QUOTA, more]},
        {"name": "b", "key": "k2", "tenant": "acme", "quotas": [more, QUOTA]},
        {"name": "c", "key": "k3", "tenant": "zeta"},
    ]
    assert len(read_keys(json.dumps({"keys": keys}))) == 3
    del keys[1]["quotas"]
    with pytest.raises(ValueError, match=r"keys\[1\].quotas: other ones than those of keys\[0\]"):
        read_keys(json.dumps({"keys": keys}))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("keys: [\n  secret", "not readable as YAML, line 3"),
        ("keys:\n- {name: a, key: secret, key: other}", "not readable as YAML, line 2"),
        ("keys:\n", "keys: not allowed; allowed: a list"),
        ("keys:\n- secret\n", r"keys\[0\]: not allowed"),
    ],
)
def test_broken_file_of_records_is_refused_without_being_shown(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refusal:
        read_keys(text)
    assert "secret" not in str(refusal.value)
