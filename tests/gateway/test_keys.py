"""API keys: which ones pass, where they are looked for, and that they never show."""

import os
from pathlib import Path, PosixPath
from typing import Any

import pytest

from serving.config.api_keys import read_keys
from serving.domain.errors import UnauthorizedError
from serving.gateway.edge.auth import CHECK_INTERVAL_S, ApiKeys, KeysOfFile, presented_key


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


def test_key_names_its_tenant() -> None:
    keys = ApiKeys(["k1", "k2", "k3"], {"k1": "acme", "k2": "acme"})
    assert [keys.check(key) for key in ("k1", "k2", "k3")] == ["acme", "acme", None]
    assert ApiKeys([]).check("k1") is None


class Clock:
    """A time that the test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def of_file(path: Path, clock: Clock) -> KeysOfFile:
    def parse(text: str) -> ApiKeys:
        named = read_keys(text)
        if not named:
            raise ValueError("no API key")
        tenants = {key.key: key.tenant for key in named if key.tenant is not None}
        return ApiKeys((key.key for key in named), tenants)

    return KeysOfFile(path, parse, clock)


def test_changed_file_rotates_keys_without_a_restart(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text("team old-key\n")
    keys = of_file(path, clock)
    assert keys
    assert keys.check("old-key") == "team"

    path.write_text("team old-key\nteam new-key\n")
    clock.now_s += CHECK_INTERVAL_S
    assert (keys.check("old-key"), keys.check("new-key")) == ("team", "team")

    path.write_text("team new-key\n")
    clock.now_s += CHECK_INTERVAL_S
    assert keys.check("new-key") == "team"
    with pytest.raises(UnauthorizedError):
        keys.check("old-key")


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
    keys.check("key-two")


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
    keys.check("old")
    Unreadable.fails = False
    clock.now_s += CHECK_INTERVAL_S
    keys.check("new-key")


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
    keys.check("very-secret")
    with pytest.raises(UnauthorizedError):
        keys.check(None)
    assert "api_keys_not_taken" in caplog.text
    assert "very-secret" not in caplog.text
