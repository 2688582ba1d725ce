"""Names what the answers of a run are compared with."""

from enum import StrEnum


class CheckKind(StrEnum):
    """The source of the right answer to a request."""

    NONE = "none"  # none; nothing is compared
    PACED = "paced"  # by the formula of paced engines
    RECORDED = "recorded"  # by an earlier pass, which is recorded first
