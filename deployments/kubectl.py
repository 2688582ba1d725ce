"""Reads a Kubernetes cluster through `kubectl`, with whatever credentials the operator has for it.

Owns the subprocess and the words of its failures. Changes nothing: an apply is a dry run, which the
API server answers with the object as it would stand. Does not own what is read, nor the decisions.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

# Of one request; kubectl gives up on a server that does not answer a little earlier.
_WITHIN_S = 30.0
_REQUEST_S = 25
_MAX_REASON = 1000
# A line of Kubernetes' own logging, such as `E1123 09:46:01.2 …`, and a warning of the server.
_LOGGED = re.compile(r"[IWEF]\d{4} |Warning: ")
_NOT_FOUND = "(NotFound)"
_NO_KIND = "the server doesn't have a resource type"


class KubectlError(Exception):
    """The cluster could not be asked; the message has kubectl's words, and what to do."""


class Kubectl:
    """One cluster, by the name that the operator's kubeconfig has for it."""

    def __init__(self, context: str | None = None, kubeconfig: str | None = None) -> None:
        """`None` leaves the choice to kubectl, which reads `KUBECONFIG`.

        Raises:
            KubectlError: there is no kubectl. Install it.
        """
        path = shutil.which("kubectl")
        if path is None:
            raise KubectlError("kubectl is not on the PATH: install it, or add its folder")
        self._command = [path, f"--request-timeout={_REQUEST_S}s"]
        if context is not None:
            self._command.append(f"--context={context}")
        if kubeconfig is not None:
            self._command.append(f"--kubeconfig={kubeconfig}")

    def get(self, kind: str, name: str, namespace: str | None = None) -> Json | None:
        """Returns one object; `None` if there is none of this name, or none of this kind.

        Raises:
            KubectlError: nobody answered, or the answer was a refusal.
        """
        try:
            return self._ask(["get", kind, name, *_within(namespace)])
        except KubectlError as error:
            if _NOT_FOUND in f"{error}" or _NO_KIND in f"{error}":
                return None
            raise

    def list_objects(
        self,
        kind: str,
        namespace: str | None = None,
        selector: str | None = None,
        fields: str | None = None,
    ) -> list[Json]:
        """Returns all objects of a kind, in one namespace or (`None`) in all; none of no kind.

        `selector` is one of labels, `fields` one of the object's fields; `None` chooses all.

        Raises:
            KubectlError: nobody answered, or the answer was a refusal.
        """
        where = _within(namespace) if namespace is not None else ["--all-namespaces"]
        chosen = [] if selector is None else [f"--selector={selector}"]
        chosen += [] if fields is None else [f"--field-selector={fields}"]
        try:
            items: list[Json] = self._ask(["get", kind, *where, *chosen])["items"]
        except KubectlError as error:
            if _NO_KIND in f"{error}":
                return []
            raise
        return items

    def dry_run(self, body: Json) -> Json:
        """Returns an object as it would stand after `kubectl apply`, defaults included.

        Raises:
            KubectlError: the API server would refuse it, or nobody answered.
        """
        return self._ask(["apply", "--dry-run=server", "--filename=-"], given=json.dumps(body))

    def _ask(self, arguments: Sequence[str], given: str | None = None) -> Json:
        command = [*self._command, *arguments, "--output=json"]
        try:
            done = subprocess.run(
                command, input=given, capture_output=True, text=True, timeout=_WITHIN_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(
                f"kubectl {' '.join(arguments)}: no answer within {_WITHIN_S:g} s; is the cluster "
                "reachable from here?"
            ) from error
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {_reason(done.stderr)}")
        answer: Json = json.loads(done.stdout)
        return answer


def _within(namespace: str | None) -> list[str]:
    return [] if namespace is None else [f"--namespace={namespace}"]


def _reason(text: str) -> str:
    """Returns kubectl's reason as one line; what it logs of its retries is left out."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if not _LOGGED.match(line)]
    return "; ".join(said or lines[-1:])[:_MAX_REASON] or "it failed without a word"
