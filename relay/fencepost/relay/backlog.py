"""The backlog: what each destination has not been sent yet, and since when the oldest of it waits; never a payload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import Connection
from psycopg.rows import class_row

__all__ = ["COUNT_MAX", "Backlog", "backlog", "oldest"]

COUNT_MAX = 10_000

# Per slot: rows numbered above the acked tick's hint, and late rows below it; of a page under way only what comes after
# its position. Each of them by an index, and never more than the limit, whether they are the destination's business or not.
BACKLOG: LiteralString = """
SELECT d.destination, d.kind, count(w.seq) FILTER (WHERE w.own) AS waiting, count(w.seq) >= %(most)s AS more,
       extract(epoch FROM clock_timestamp() - min(w.recorded_at) FILTER (WHERE w.own))::float AS oldest_seconds
FROM fencepost.destination AS d
LEFT JOIN LATERAL (
    SELECT o.seq, o.recorded_at,
           EXISTS (SELECT FROM fencepost.route AS r
                   WHERE r.destination = d.destination
                     AND (r.match = '*' OR r.match = o.type
                          OR right(r.match, 2) = '.*' AND starts_with(o.type, left(r.match, -1)))
                     AND o.seq > r.since AND (r.until IS NULL OR o.seq <= r.until)) AS own
    FROM fencepost.slot AS s
    LEFT JOIN LATERAL (SELECT k.era, k.acked_tick, k.end_tick, k.position FROM fencepost.ack AS k
                       WHERE k.destination = s.destination AND k.slot = s.slot ORDER BY k.n DESC LIMIT 1) AS a ON true
    JOIN fencepost.tick AS t ON t.era = coalesce(a.era, d.start_era) AND t.n = coalesce(a.acked_tick, d.start_tick)
    JOIN fencepost.tick AS e ON e.era = coalesce(a.era, d.start_era) AND e.n = coalesce(a.end_tick, d.start_tick)
    CROSS JOIN LATERAL (
        SELECT m.seq, m.recorded_at, m.type, m.xid FROM fencepost.outbox AS m WHERE m.slot = s.slot AND m.seq > t.hint
        UNION ALL
        SELECT l.seq, l.recorded_at, l.type, l.xid FROM fencepost.outbox AS l
        WHERE l.slot = s.slot AND l.seq <= t.hint
          AND (l.xid = ANY (t.snap_xip) OR l.xid >= t.snap_xmax AND l.xid < t.next)) AS o
    WHERE s.destination = d.destination
      AND NOT (o.seq <= coalesce(a.position, 0) AND pg_visible_in_snapshot(o.xid, e.snap))
    LIMIT %(most)s) AS w ON true
WHERE d.destination <> '-'
GROUP BY d.destination, d.kind ORDER BY d.destination"""

# Per slot one row by an index each: the first above both hint and position, the late ones of the page that are still to
# come, and those below the position that only the next page will show.
OLDEST: LiteralString = """
SELECT d.destination, extract(epoch FROM clock_timestamp() - min(o.recorded_at))::float
FROM fencepost.destination AS d
LEFT JOIN LATERAL (
    SELECT w.recorded_at
    FROM fencepost.slot AS s
    LEFT JOIN LATERAL (SELECT k.era, k.acked_tick, k.end_tick, k.position FROM fencepost.ack AS k
                       WHERE k.destination = s.destination AND k.slot = s.slot ORDER BY k.n DESC LIMIT 1) AS a ON true
    JOIN fencepost.tick AS t ON t.era = coalesce(a.era, d.start_era) AND t.n = coalesce(a.acked_tick, d.start_tick)
    JOIN fencepost.tick AS e ON e.era = coalesce(a.era, d.start_era) AND e.n = coalesce(a.end_tick, d.start_tick)
    CROSS JOIN LATERAL (SELECT coalesce(a.position, 0)) AS p (position)
    CROSS JOIN LATERAL (
        (SELECT m.recorded_at FROM fencepost.outbox AS m
         WHERE m.slot = s.slot AND m.seq > greatest(t.hint, p.position) ORDER BY m.seq LIMIT 1)
        UNION ALL
        SELECT l.recorded_at FROM fencepost.outbox AS l
        WHERE l.slot = s.slot AND l.seq > p.position AND l.seq <= t.hint
          AND (l.xid = ANY (t.snap_xip) OR l.xid >= t.snap_xmax AND l.xid < t.next)
        UNION ALL
        SELECT n.recorded_at FROM fencepost.outbox AS n
        WHERE n.slot = s.slot AND n.seq <= p.position
          AND (n.xid = ANY (e.snap_xip) OR n.xid >= e.snap_xmax AND n.xid < e.next)) AS w
    WHERE s.destination = d.destination) AS o ON true
WHERE d.destination <> '-'
GROUP BY d.destination"""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a destination answers for and has not been sent yet; `more` when looking stopped at the limit."""

    destination: str
    kind: str
    waiting: int
    more: bool
    oldest_seconds: float | None

    @property
    def unsent(self) -> str:
        """The number for people: at least so many where there may be more."""
        return f"{'>= ' if self.more else ''}{self.waiting}"


def backlog(conn: Connection[Any]) -> list[Backlog] | None:
    """The unsent events of every destination; None for a login without the relay role."""
    try:
        with conn.cursor(row_factory=class_row(Backlog)) as cursor:
            return cursor.execute(BACKLOG, {"most": COUNT_MAX}).fetchall()
    except psycopg.errors.InsufficientPrivilege:
        return None


def oldest(conn: Connection[Any]) -> dict[str, float | None]:
    """Age in seconds of the oldest unsent event of every registered destination, None where nothing waits.

    One statement that touches a few rows a slot, whatever the backlog; needs the relay role.
    """
    return {str(name): None if age is None else max(0.0, age) for name, age in conn.execute(OLDEST)}
