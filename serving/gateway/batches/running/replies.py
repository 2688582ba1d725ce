"""What a reply makes of its line: it is the answer, or the line is asked again later. Pure."""

from serving.gateway.batches.answers import LineReply

# Refusals that pass: the model's line is full, a quota is used up, no engine is there.
_PASSING = frozenset({429, 503})
# A fault without a reason may be of the moment; one with a reason says that it stays.
_MAX_FAULTS = 3
_LONGEST_WAIT_S = 60.0


def is_fault(reply: LineReply) -> bool:
    """Returns whether a reply is a fault of a server."""
    return reply.status >= 500 and reply.status not in _PASSING


def is_answer(reply: LineReply, num_faults: int) -> bool:
    """Returns whether a reply is what becomes of its line; else the line is asked again.

    `num_faults` are the line's replies that were faults, this one included.
    """
    if reply.status in _PASSING:
        return False
    return reply.status < 500 or reply.is_final or num_faults >= _MAX_FAULTS


def wait_s(reply: LineReply, num_refusals: int, patience_s: float) -> float:
    """Returns when a line that was refused is asked again: when it was told to, within bounds."""
    told_s = reply.retry_after_s or patience_s * 2.0 ** min(num_refusals, 10)
    return min(max(told_s, patience_s), _LONGEST_WAIT_S)
