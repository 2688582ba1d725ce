"""kubectl's answers and refusals, from a program that says what the real one has said."""

import stat
from pathlib import Path

import pytest

from deployments.kubectl import Kubectl, KubectlError


@pytest.fixture
def kubectl_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of shell commands that runs as kubectl; its arguments are noted in `asked`."""
    program = tmp_path / "kubectl"
    script = tmp_path / "script"
    asked = tmp_path / "asked"
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n. {script}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}", prepend=":")
    return script


def test_object_is_returned_and_asked_for_with_the_operators_context(kubectl_says: Path) -> None:
    kubectl_says.write_text('echo \'{"kind": "RayService"}\'')
    kubectl = Kubectl(context="prod", kubeconfig="/k")
    assert kubectl.get("rayservices.ray.io", "llm", "serving") == {"kind": "RayService"}
    assert (kubectl_says.parent / "asked").read_text() == (
        "--request-timeout=25s --context=prod --kubeconfig=/k get rayservices.ray.io llm "
        "--namespace=serving --output=json\n"
    )


@pytest.mark.parametrize(
    "said",
    [
        'Error from server (NotFound): rayservices.ray.io "llm" not found',
        'error: the server doesn\'t have a resource type "rayservices"',
    ],
)
def test_what_is_not_there_is_nothing(kubectl_says: Path, said: str) -> None:
    kubectl_says.write_text(f"cat >&2 <<'END'\n{said}\nEND\nexit 1")
    assert Kubectl().get("rayservices.ray.io", "llm", "serving") is None


def test_kind_that_the_cluster_does_not_have_has_no_objects(kubectl_says: Path) -> None:
    kubectl_says.write_text('echo "error: the server doesn\'t have a resource type" >&2; exit 1')
    assert Kubectl().list_objects("podmonitors") == []


def test_refusal_is_told_in_kubectls_words_without_what_it_logs(kubectl_says: Path) -> None:
    kubectl_says.write_text(
        """cat >&2 <<'END'
E1123 09:46:01.233171   12345 memcache.go:265] couldn't get current server API group list
Warning: resource is deprecated
Error from server (Forbidden): pods is forbidden: User "jane" cannot list resource "pods"
END
exit 1"""
    )
    with pytest.raises(KubectlError) as refused:
        Kubectl().list_objects("pods", "serving")
    assert f"{refused.value}" == (
        "kubectl get pods --namespace=serving: Error from server (Forbidden): pods is forbidden: "
        'User "jane" cannot list resource "pods"'
    )


def test_failure_without_a_word_is_told_as_one(kubectl_says: Path) -> None:
    kubectl_says.write_text("exit 3")
    with pytest.raises(KubectlError, match="it failed without a word"):
        Kubectl().get("pods", "a")
