"""Which batch of the lane's database is leased next.

Owns the query. Does not own the leases (`store`). A claim holds up every other writer of the
folder, so it takes time in proportion to the batches that have not ended, and no more.
"""

import sqlite3

# Batches that nobody has go first to the tenants of whom the fewest are worked on.
_CLAIMABLE = """
WITH leased AS MATERIALIZED (
  SELECT tenant, count(*) AS num FROM batches
  WHERE has_ended = 0 AND until_s > :now GROUP BY tenant)
SELECT batch_id, term FROM batches LEFT JOIN leased USING (tenant)
WHERE has_ended = 0 AND until_s <= :now
ORDER BY coalesce(leased.num, 0), seq LIMIT 1
"""


def next_batch(database: sqlite3.Connection, now_s: float) -> tuple[str, int] | None:
    """Returns the batch that is to be leased next, and its last term; `None` if there is none."""
    row = database.execute(_CLAIMABLE, {"now": now_s}).fetchone()
    return None if row is None else (row[0], row[1])
