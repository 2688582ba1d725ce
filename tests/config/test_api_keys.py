"""How API keys are written, and that they never show."""

import hashlib
import json
import re

import pytest
import yaml

from serving.config.api_keys import KeyRecord, KeyScope, ModelRoute, read_keys
from serving.config.application import OpenField


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
    )
    assert metrics == KeyRecord(
        hashlib.sha256(b"k2").digest(), name="prometheus", scopes=frozenset({KeyScope.METRICS})
    )
    assert everything.scopes == frozenset(KeyScope)


def test_plain_key_may_do_everything_for_ever() -> None:
    (record,) = read_keys("acme k1")
    assert record.scopes == frozenset(KeyScope)
    assert (record.models, record.routes, record.expires_at_s) == (None, None, None)


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
