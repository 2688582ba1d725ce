"""`slicewise observe` as a test runs it: started, asked, ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx
from shipped import ROOT

_STOP_S = 60.0


class Observing:
    """One Prometheus with these arguments of `slicewise observe`. A context manager."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self._folder = folder
        self._arguments = arguments
        self._child: subprocess.Popen[str] | None = None
        self._client = httpx.Client(timeout=30.0, verify=False)
        self.url = ""

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._child = subprocess.Popen(
            [str(Path(sys.executable).with_name("slicewise")), "observe", *self._arguments],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(self._folder)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._child.stdout is not None
        told = self._child.stdout.readline()
        assert "Prometheus on http://" in told, told
        self.url = told.split("Prometheus on ")[1].split(",")[0]
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        assert self._child is not None
        self._child.send_signal(signal.SIGINT)
        assert self._child.wait(_STOP_S) == 0
        assert self._child.stdout is not None
        self._child.stdout.close()

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of Prometheus' API; its error fails the test."""
        answer = self._client.get(f"{self.url}/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", (parameters, answer.get("error"))
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def value(self, expression: str) -> float | None:
        """The value of a query with at most one result."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None
