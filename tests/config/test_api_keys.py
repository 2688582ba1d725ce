"""How API keys are written, and that they never show."""

import pytest

from serving.config.api_keys import read_keys


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
