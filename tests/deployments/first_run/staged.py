"""A stage's process that does what the run's file says of its stage: the real protocol, no engine.

`python -m tests.deployments.first_run.staged`, in the place of `deployments.first_run.child`. The
configuration names for each stage what it does.
"""

import json
import os
import signal
import sys
import time

from deployments.first_run.context import message_of, teller
from deployments.first_run.process import MESSAGES_VARIABLE
from deployments.first_run.results import Measurement, failed, judged


def main() -> int:
    tell = teller(int(os.environ[MESSAGES_VARIABLE]))
    request = json.load(sys.stdin)
    stage = request["stage"]
    print(f"{stage} begins")  # noqa: T201
    sys.stdout.flush()
    tell({"file": "seen.txt", "text": f"{sorted(request['earlier'])}"})
    match request["settings"].get(stage, "pass"):
        case "pass":
            tell(message_of(judged(stage, [Measurement("it", "1", "1", is_met=True)])))
        case "fail":
            tell(message_of(failed(stage, "it is broken")))
        case "hang":
            print("and hangs")  # noqa: T201
            sys.stdout.flush()
            while True:
                time.sleep(60)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            return 3
        case "leave a child":
            # It holds the pipes for longer than the stage lives.
            if os.fork() == 0:
                time.sleep(600)
            tell(message_of(judged(stage, [Measurement("it", "1", "1", is_met=True)])))
        case "end the run":
            os.kill(os.getppid(), signal.SIGTERM)
            while True:
                time.sleep(60)
        case other:
            raise ValueError(other)
    return 0


if __name__ == "__main__":
    sys.exit(main())
