"""API keys: which ones pass, where they are looked for, and that they never show."""

import os
from pathlib import Path, PosixPath
from typing import Any

import pytest

from serving.config.api_keys import KeyRecord, read_keys
from serving.domain.errors import UnauthorizedError
from serving.gateway.edge.auth import ANYBODY, CHECK_INTERVAL_S, ApiKeys, KeysOfFile, presented_key

NOW_S = 1_800_000_000.0


def keys_of(text: str) -> ApiKeys:
    return ApiKeys(read_keys(text))


@pytest.mark.parametrize("key", ["old-key", "new-key"])
def test_each_of_several_keys_passes(key: str) -> None:
    keys_of("old-key,new-key").check(key, NOW_S)


@pytest.mark.parametrize("key", [None, "", "old-ke", "old-key ", "OLD-KEY", "schlüssel"])
def test_no_key_and_an_unknown_key_are_refused(key: str | None) -> None:
    with pytest.raises(UnauthorizedError):
        keys_of("old-key,new-key").check(key, NOW_S)


@pytest.mark.parametrize("key", [None, "anything"])
def test_without_keys_everybody_passes(key: str | None) -> None:
    keys = ApiKeys([])
    assert not keys
    assert keys.check(key, NOW_S) == ANYBODY


def test_keys_show_neither_in_their_repr_nor_in_the_refusal() -> None:
    keys = keys_of("very-secret")
    assert "very-secret" not in repr(keys)
    with pytest.raises(UnauthorizedError) as refusal:
        keys.check("mistyped-secret", NOW_S)
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


def test_key_names_its_tenant() -> None:
    keys = keys_of("acme k1, acme k2, k3")
    named = [keys.check(key, NOW_S).tenant for key in ("k1", "k2", "k3")]
    assert named == ["acme", "acme", None]
    assert ApiKeys([]).check("k1", NOW_S).tenant is None


class Clock:
    """A time that the test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def of_file(path: Path, clock: Clock) -> KeysOfFile:
    def parse(text: str) -> list[KeyRecord]:
        records = read_keys(text)
        if not records:
            raise ValueError("no API key")
        return records

    return KeysOfFile(path, parse, clock)


def test_changed_file_rotates_keys_without_a_restart(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("team old-key\n")
    keys = of_file(path, clock)
    assert keys
    assert keys.check("old-key", NOW_S).tenant == "team"

    path.write_text("team old-key\nteam new-key\n")
    clock.now_s += CHECK_INTERVAL_S
    assert [keys.check(key, NOW_S).tenant for key in ("old-key", "new-key")] == ["team", "team"]

    path.write_text("team new-key\n")
    clock.now_s += CHECK_INTERVAL_S
    assert keys.check("new-key", NOW_S).tenant == "team"
    with pytest.raises(UnauthorizedError):
        keys.check("old-key", NOW_S)


def test_mounted_secret_that_moves_its_link_is_noticed(tmp_path: Path) -> None:
    clock = Clock()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(f"key-{name}\n")
        os.utime(tmp_path / name / "keys", ns=(0, 0))
    (tmp_path / "data").symlink_to("one")
    keys = of_file(tmp_path / "data" / "keys", clock)
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(tmp_path / "data")
    clock.now_s += CHECK_INTERVAL_S
    keys.check("key-two", NOW_S)


def test_file_that_cannot_be_read_once_is_read_at_the_next_check(tmp_path: Path) -> None:
    class Unreadable(PosixPath):
        fails = False

        def read_text(self, *arguments: Any, **options: Any) -> str:
            if Unreadable.fails:
                raise OSError("the mount is being replaced")
            return super().read_text(*arguments, **options)

    path, clock = Unreadable(tmp_path / "keys"), Clock()
    path.write_text("old\n")
    keys = of_file(path, clock)
    path.write_text("new-key\n")
    Unreadable.fails = True
    clock.now_s += CHECK_INTERVAL_S
    keys.check("old", NOW_S)
    Unreadable.fails = False
    clock.now_s += CHECK_INTERVAL_S
    keys.check("new-key", NOW_S)


@pytest.mark.parametrize("text", [None, "", "# nobody\n", "a b c\n"])
def test_file_without_usable_keys_leaves_those_there_were(
    text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("very-secret\n")
    keys = of_file(path, clock)
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    clock.now_s += CHECK_INTERVAL_S
    keys.check("very-secret", NOW_S)
    with pytest.raises(UnauthorizedError):
        keys.check(None, NOW_S)
    assert "api_keys_not_taken" in caplog.text
    assert "very-secret" not in caplog.text
