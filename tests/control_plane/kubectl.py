"""The real kubectl, as an operator uses it: from the same folder as the server's binaries."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.needs import do_without

from .assets import VARIABLE

_WITHIN_S = 60.0
Json = dict[str, Any]


def kubeconfig(url: str, token: str, ca_file: Path) -> str:
    """The text of a kubeconfig with one cluster and one user. JSON, which is YAML too."""
    name = "tests"
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": name, "cluster": {"server": url, "certificate-authority": f"{ca_file}"}}
            ],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        }
    )


def kubectl_binary() -> Path:
    """Where kubectl is; without one the test is not run, and says so."""
    path = Path(os.environ.get(VARIABLE, "")) / "kubectl"
    if not os.access(path, os.X_OK):
        do_without(f"{VARIABLE} names no folder with kubectl, which `setup-envtest` puts there too")
    return path


class RefusedByKubectlError(AssertionError):
    """kubectl failed; the message is its own."""


class Kubectl:
    """Runs kubectl for one kubeconfig."""

    def __init__(self, kubeconfig_file: Path) -> None:
        self._command = [f"{kubectl_binary()}", f"--kubeconfig={kubeconfig_file}"]

    def apply(self, body: Json, *options: str) -> None:
        """Applies an object as `kubectl apply -f` does: on the client, unless told otherwise.

        Raises:
            RefusedByKubectlError: it is not applied.
        """
        self._run("apply", "-f", "-", *options, given=json.dumps(body))

    def get(self, kind: str, name: str, namespace: str) -> Json:
        """Returns one object."""
        answer: Json = json.loads(self._run("get", kind, name, "-n", namespace, "-o", "json"))
        return answer

    def get_of_cluster(self, kind: str, name: str) -> Json:
        """Returns one object that lies in no namespace."""
        answer: Json = json.loads(self._run("get", kind, name, "-o", "json"))
        return answer

    def set_status(self, body: Json, status: Json) -> None:
        """Sets an object's status, as its controller does."""
        metadata = body["metadata"]
        self._run(
            *("patch", body["kind"], metadata["name"], "-n", metadata["namespace"]),
            *("--subresource=status", "--type=merge", "-p", json.dumps({"status": status})),
        )

    def drain(self, node: str, timeout_s: int) -> None:
        """Cordons a node and evicts its pods, as our pages say; waits until they are gone.

        Raises:
            RefusedByKubectlError: some are there after `timeout_s`.
        """
        options = ("--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={timeout_s}s")
        self._run("drain", node, *options)

    def _run(self, *arguments: str, given: str = "") -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            check=False,
        )
        if done.returncode:
            raise RefusedByKubectlError(done.stderr)
        return done.stdout
