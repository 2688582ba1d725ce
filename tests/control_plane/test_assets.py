"""What is said where binaries or CRDs are missing."""

from pathlib import Path

from .assets import ACTING, BINARIES, VARIABLE, missing_binaries, missing_crds


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


def test_folder_of_envtest_is_told_what_it_does_not_bring(tmp_path: Path) -> None:
    for name in BINARIES:
        (tmp_path / name).touch(mode=0o755)
    reason = missing_binaries({VARIABLE: str(tmp_path)}, (*BINARIES, *ACTING))
    assert reason is not None
    assert "lacks kube-controller-manager and kube-scheduler and kwok: " in reason


def test_missing_crds_are_named(tmp_path: Path) -> None:
    assert "ray.io_rayservices" in str(missing_crds(tmp_path))
