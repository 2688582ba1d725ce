"""Which batch of the lane's database is leased next, and which are looked at.

Owns the queries. Does not own the leases (`store`). A claim holds up every other writer of the
folder, so it takes time in proportion to the batches that have not ended, and no more.
"""

import sqlite3

from serving.gateway.batches.store import Claim

_RECORD = "CAST(record AS TEXT)"
_EXPIRES_AT_S = f"json_extract({_RECORD}, '$.expires_at_s')"
OPEN_IN_TURN = f"""
SELECT batch_id, record FROM (
  SELECT batch_id, record, seq, {_EXPIRES_AT_S} AS expires_at_s,
    row_number() OVER (PARTITION BY tenant ORDER BY {_EXPIRES_AT_S}, seq) AS place
  FROM batches WHERE has_ended = 0)
ORDER BY place, expires_at_s, seq LIMIT ?
"""
"""So many open batches, one of each tenant in turn, those first whose window is over first."""
# As `next_step` has it.
_HAS_LINES = f"""(
  json_extract({_RECORD}, '$.status') = 'in_progress'
  AND json_extract({_RECORD}, '$.num_completed') + json_extract({_RECORD}, '$.num_failed')
    < json_extract({_RECORD}, '$.num_total')
  AND {_EXPIRES_AT_S} > :now)"""
_WHICH = {
    Claim.ANY: "TRUE",
    Claim.OF_NEW_TENANT: "leased.num IS NULL",
    Claim.WITHOUT_LINES: f"NOT {_HAS_LINES}",
}
# Batches that nobody has go first to the tenants of whom the fewest are worked on.
_CLAIMABLE = {
    which: f"""
WITH leased AS MATERIALIZED (
  SELECT tenant, count(*) AS num FROM batches
  WHERE has_ended = 0 AND until_s > :now GROUP BY tenant)
SELECT batch_id, term FROM batches LEFT JOIN leased USING (tenant)
WHERE has_ended = 0 AND until_s <= :now AND {condition}
ORDER BY coalesce(leased.num, 0), {_EXPIRES_AT_S}, seq LIMIT 1
"""
    for which, condition in _WHICH.items()
}


def next_batch(
    database: sqlite3.Connection, now_s: float, which: Claim = Claim.ANY
) -> tuple[str, int] | None:
    """Returns the batch that is to be leased next, and its last term; `None` if there is none."""
    row = database.execute(_CLAIMABLE[which], {"now": now_s}).fetchone()
    return None if row is None else (row[0], row[1])
