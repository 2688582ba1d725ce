"""Which requests can be in time no more, and what turns they have. Pure.

While engines lack, all would be late that wait behind those that are late. So these wait behind
those that can still be in time, and have a fourth of the work that engines take, so that none waits
for ever. It is a fourth of the work and not of the turns: whatever comes meanwhile may be longer.
"""

# Of what an objective allows for a first token, the share that a request may wait before it has an
# engine. The other half is for the engine: the part per prompt token is at most twice what an
# engine alone takes for one (`objectives`).
WAIT_SHARE = 0.5
# One part of so many is for those that are overdue. Chosen on the conversations that settings are
# chosen on (docs/results/policies.md), where it was one turn of so many: with one of eight service
# is as good, with every second one 0.2 to 0.5 points worse.
OVERDUE_PART = 4


def overdue_after_s(ttft_s: float) -> float:
    """Returns after how long a request is overdue that waits for an engine, by its objective."""
    return WAIT_SHARE * ttft_s


def is_turn_of_overdue(others_work: float, work: float) -> bool:
    """Returns whether the next turn is for the first that is overdue, which takes so much `work`.

    The others have had `others_work` that those who are overdue have not had their part of yet.
    """
    return others_work >= (OVERDUE_PART - 1) * work


def others_work_after(others_work: float, work: float, *, is_overdue: bool) -> float:
    """Returns the `others_work` after a turn of one that is overdue, or of another meanwhile."""
    if is_overdue:
        return max(0.0, others_work - (OVERDUE_PART - 1) * work)
    return others_work + work
