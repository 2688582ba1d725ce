"""The process of one stage: `python -m deployments.first_run.child`, its request on its input."""

import json
import os
import sys
import traceback

from deployments.first_run.context import context_of, message_of, teller
from deployments.first_run.process import MESSAGES_VARIABLE
from deployments.first_run.results import failed
from deployments.first_run.stages import PROGRAMS


def main() -> int:
    """Runs the stage, and tells its result whatever happens but a signal."""
    # Not for what the stage starts: who holds the pipe could go on writing to it.
    descriptor = int(os.environ.pop(MESSAGES_VARIABLE))
    os.set_inheritable(descriptor, False)  # noqa: FBT003 - the call's own argument
    context = context_of(json.load(sys.stdin), teller(descriptor))
    try:
        result = PROGRAMS[context.stage](context)
    except Exception as error:  # noqa: BLE001 - whatever it was is what the stage found
        traceback.print_exc()
        result = failed(context.stage, f"{type(error).__name__}: {error}")
    context.tell(message_of(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
