"""Every change of some pods, as kubectl's watch shows it: what was so at any moment."""

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .kubectl import kubectl_binary

Json = dict[str, Any]
_POLL_S = 0.05
_WITHIN_S = 60.0


class ReadinessWatch:
    """Watches the pods with these labels from its beginning to its end. A context manager."""

    def __init__(
        self, kubeconfig: Path, namespace: str, labels: Mapping[str, str], folder: Path
    ) -> None:
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        self._command = [f"{kubectl_binary()}", f"--kubeconfig={kubeconfig}", "get", "pods"]
        self._command += ["-n", namespace, "-l", selector, "-o", "json"]
        self._command += ["--watch", "--output-watch-events"]
        self._path = folder / "watched.json"

    def __enter__(self) -> "ReadinessWatch":
        with self._path.open("wb") as file:
            self._process = subprocess.Popen(self._command, stdout=file)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)

    def wait_ready(self, names: set[str]) -> None:
        """Waits until it has shown that these pods, and no others, are ready."""
        deadline_s = time.monotonic() + _WITHIN_S
        while self._ready()[-1:] != [names]:
            assert time.monotonic() < deadline_s, f"shown: {self._ready()[-1:]}, not {names}"
            time.sleep(_POLL_S)

    def fewest(self) -> int:
        """The fewest ready pods that there were at once, since all of the first were."""
        counts = [len(names) for names in self._ready()]
        return min(counts[counts.index(max(counts)) :])

    def _ready(self) -> list[set[str]]:
        """The names of the ready pods after each change."""
        found: list[set[str]] = [set()]
        for event in self._events():
            pod = event["object"]
            name = pod["metadata"]["name"]
            is_so = event["type"] != "DELETED" and is_ready(pod)
            found.append(found[-1] | {name} if is_so else found[-1] - {name})
        return found

    def _events(self) -> list[Json]:
        """What was written so far; the last event may be only half there."""
        text, decoder, events, at = self._path.read_text(), json.JSONDecoder(), [], 0
        while (begin := text.find("{", at)) >= 0:
            try:
                event, at = decoder.raw_decode(text, begin)
            except json.JSONDecodeError:
                break
            events.append(event)
        return events


def is_ready(pod: Json) -> bool:
    """Whether a pod takes requests: it is ready, and nobody has asked for its end."""
    conditions = pod["status"].get("conditions", ())
    states = {each["type"]: each["status"] for each in conditions}
    return states.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]
