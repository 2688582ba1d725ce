"""What is said where binaries or CRDs are missing, and what is made of it."""

from pathlib import Path

import pytest

from .assets import BINARIES, VARIABLE, do_without, missing_binaries, missing_crds


def test_missing_folder_is_named_with_the_way_to_get_one() -> None:
    reason = missing_binaries({})
    assert reason is not None
    assert reason.startswith(f"{VARIABLE} names no folder with etcd and kube-apiserver")
    assert "setup-envtest" in reason


def test_folder_that_lacks_a_binary_is_told_which(tmp_path: Path) -> None:
    environment = {VARIABLE: str(tmp_path)}
    for name in BINARIES:
        reason = missing_binaries(environment)
        assert reason is not None
        assert name in reason
        (tmp_path / name).touch(mode=0o755)
    assert missing_binaries(environment) is None


def test_missing_crds_are_named(tmp_path: Path) -> None:
    assert "ray.io_rayservices" in str(missing_crds(tmp_path))


@pytest.mark.parametrize(
    ("environment", "outcome"),
    [({}, pytest.skip.Exception), ({"CI": "true"}, pytest.fail.Exception)],
)
def test_what_is_missing_skips_a_test_and_fails_it_in_ci(
    environment: dict[str, str], outcome: type[BaseException]
) -> None:
    with pytest.raises(outcome, match="no etcd"):
        do_without("no etcd", environment)
