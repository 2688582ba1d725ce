"""The program of the child process that reads the libtpu SDK; run by path, never imported by us.

Owns nothing but the calls. For each line on its input it reads the metrics named on its command
line and prints one line of JSON behind a mark, because libtpu prints too. The SDK has no deadline,
may crash the process and maps 150 MB, so it lives here.
"""

import json
import sys

from libtpu.sdk import tpumonitoring  # type: ignore[import-not-found]  # the user's, not ours

MARK = "@"


def main() -> None:
    """Answers until the input ends."""
    known = set(tpumonitoring.list_supported_metrics())
    wanted = [name for name in sys.argv[1:] if name in known]
    for _ in sys.stdin:
        values = {name: list(tpumonitoring.get_metric(name).data()) for name in wanted}
        sys.stdout.write(f"{MARK}{json.dumps(values)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
