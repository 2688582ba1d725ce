"""Captures what the chips of this host say now; a program, run as a module.

Prints one JSON object: the exporter's capture, and the values that it makes of it by series.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from serving.exporters.service import replaying_exporter

_LIMIT_S = 10.0
_BUDGET_S = 5.0


def capture_here() -> dict[str, Any]:
    """Returns the capture of the exporter itself, run as users run it.

    Raises:
        RuntimeError: the exporter did not write one; the message has its last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "capture.json"
        command = [sys.executable, "-m", "deployments.cli", "tpu-exporter", "--dump-raw", str(path)]
        plugin = os.environ.get("SLICEWISE_DEVICE_PLUGIN")
        if plugin:
            command += ["--device-plugin", plugin]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_LIMIT_S + _BUDGET_S
        )
        if not path.exists():
            words = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"the exporter wrote no capture: {words[-1][:300]}")
        values: dict[str, list[float]] = {}
        for series in replaying_exporter(path, _BUDGET_S).scrape():
            if isinstance(series.value, float | int):
                values.setdefault(series.metric, []).append(series.value)
        return {"capture": json.loads(path.read_text()), "values": values}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(capture_here()) + "\n")
