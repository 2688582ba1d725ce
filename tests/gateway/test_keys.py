"""API keys: which ones pass, where they are looked for, and that they never show."""

import pytest

from serving.errors import UnauthorizedError
from serving.gateway.keys import ApiKeys, presented_key, read_keys


@pytest.mark.parametrize("key", ["old-key", "new-key"])
def test_each_of_several_keys_passes(key: str) -> None:
    ApiKeys(["old-key", "new-key"]).check(key)


@pytest.mark.parametrize("key", [None, "", "old-ke", "old-key ", "OLD-KEY", "schlüssel"])
def test_no_key_and_an_unknown_key_are_refused(key: str | None) -> None:
    with pytest.raises(UnauthorizedError):
        ApiKeys(["old-key", "new-key"]).check(key)


@pytest.mark.parametrize("key", [None, "anything"])
def test_without_keys_everybody_passes(key: str | None) -> None:
    keys = ApiKeys([])
    assert not keys
    keys.check(key)


def test_keys_show_neither_in_their_repr_nor_in_the_refusal() -> None:
    keys = ApiKeys(["very-secret"])
    assert "very-secret" not in repr(keys)
    with pytest.raises(UnauthorizedError) as refusal:
        keys.check("mistyped-secret")
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([(b"authorization", b"Bearer k1")], "k1"),
        ([(b"authorization", b"bearer k1 ")], "k1"),
        ([(b"x-api-key", b"k2")], "k2"),
        ([(b"authorization", b"Basic abc"), (b"x-api-key", b"k2")], "k2"),
        ([(b"authorization", b"Bearer ")], None),
        ([(b"authorization", b"k1")], None),
        ([(b"accept", b"*/*")], None),
        ([], None),
    ],
)
def test_key_is_read_from_openais_and_anthropics_header(
    headers: list[tuple[bytes, bytes]], key: str | None
) -> None:
    assert presented_key(headers) == key


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
    assert [(each.tenant, each.key) for each in read_keys(text)] == keys


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("a b secret", "not 3"), ("-a secret", "letters, digits"), (f"{'t' * 64} secret", "63")],
)
def test_what_is_no_key_is_refused_without_being_shown(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refusal:
        read_keys(text)
    assert "secret" not in str(refusal.value)


def test_key_tells_whose_it_is() -> None:
    keys = ApiKeys(["k1", "k2", "k3"], {"k1": "acme", "k2": "acme"})
    assert [keys.check(key) for key in ("k1", "k2", "k3")] == ["acme", "acme", None]
    assert ApiKeys([]).check("k1") is None


def test_named_key_does_not_show_in_its_representation() -> None:
    assert "secret" not in repr(read_keys("acme very-secret"))
