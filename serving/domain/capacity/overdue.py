"""Which requests can be in time no more, and what turns they have. Pure.

While engines lack, all would be late that wait behind those that are late. So these wait behind
those that can still be in time, and have every fourth turn, so that none waits for ever.
"""

# Of what an objective allows for a first token, the share that a request may wait before it has an
# engine. The other half is for the engine: the part per prompt token is at most twice what an
# engine alone takes for one (`objectives`).
WAIT_SHARE = 0.5
# One turn of so many is for those that are overdue. Chosen on the conversations that settings are
# chosen on (docs/results/policies.md): with one of eight service is as good, with every second one
# 0.2 to 0.5 points worse.
OVERDUE_TURN = 4


def overdue_after_s(ttft_s: float) -> float:
    """Returns after how long a request is overdue that waits for an engine, by its objective."""
    return WAIT_SHARE * ttft_s


def is_turn_of_overdue(num_turns: int) -> bool:
    """Returns whether the next turn is for those that are overdue, `num_turns` after their last."""
    return num_turns >= OVERDUE_TURN - 1
