"""What can go wrong with a comparison."""


class BaselineMissingError(Exception):
    """A system that is to be compared could not be had."""


class RecordsDifferError(Exception):
    """The records that are there are of another commit, or of other work."""
