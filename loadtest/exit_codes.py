"""The verdict of a run as an exit code. Judged in this order: 4, 1, 3."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What `slicewise loadtest` exits with."""

    OK = 0  # valid, nothing failed, all objectives met
    FAILED = 1  # requests failed, tokens were lost or wrong, or nothing succeeded
    USAGE = 2  # the command or a file is wrong
    OBJECTIVE_MISSED = 3  # valid, and an objective was missed or had no samples
    CLIENT_INVALID = 4  # the numbers describe the client, not the server
