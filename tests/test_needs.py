import sys
from pathlib import Path

import pytest

from tests.needs import do_without, missing, program


@pytest.mark.parametrize(
    ("environment", "outcome"),
    [({}, pytest.skip.Exception), ({"CI": "true"}, pytest.fail.Exception)],
)
def test_what_is_missing_skips_a_test_and_fails_it_in_ci(
    environment: dict[str, str], outcome: type[BaseException]
) -> None:
    with pytest.raises(outcome, match="no such binary"):
        do_without("no such binary", environment)


def test_program_of_a_locked_package_is_found_beside_this_python() -> None:
    assert program("hadolint") == str(Path(sys.executable).with_name("hadolint"))
    assert missing("hadolint") is None


def test_program_that_is_nowhere_is_told_with_who_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing("redis-server") == "redis-server is not installed: Debian's redis-server"


def test_name_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(KeyError):
        missing("no-such-program")
