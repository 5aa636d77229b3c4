"""Ageing: recorded times are moved into the past, so that leases end and retention acts without waiting.

    events        outbox, identities, ticks, acks, parked and overtaken events: retention and retries of the relay
    reservations  reservations and deliveries of the inbox: its retention
    dead letters  dead letters of the inbox
    jobs          queued, due and changed times of jobs, their waits, the deadlines and look-ups of their effects, marks of orphaned objects
    schedules     positions of schedules: what would have been due in that time is due now
    leases        leases of running jobs, of relays and of maintenance: whoever holds them has died

Identities, digests, generations and history (attempts, publications, decisions) are never touched. Messages that are at
the broker already keep the time they carry; `MemoryBroker.age` moves that.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, LiteralString

from psycopg import Connection, sql
from psycopg.rows import tuple_row

from fencepost.operate.testing.databases import require_made_here
from fencepost.schemas.errors import InvalidInput

__all__ = ["Aged", "age"]

Aged = Literal["events", "reservations", "jobs", "schedules", "leases", "dead letters"]

LEASE = "lease_until"
TABLES: dict[Aged, tuple[str, ...]] = {
    "events": ("outbox", "event_key", "tick", "ack", "parked", "overtaken", "outbox_child", "recycled"),
    "reservations": ("reservation", "unreserved_delivery"),
    "jobs": ("job", "wait", "job_hold", "effect", "lookup", "object"),
    "schedules": ("schedule",),
    "leases": ("job", "relay", "duty"),
    "dead letters": ("dead_letter",),
}

COLUMNS: LiteralString = """
SELECT c.relname, array_agg(a.attname::text ORDER BY a.attnum)
FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
WHERE c.relnamespace = 'fencepost'::regnamespace AND c.relname = ANY (%(tables)s) AND a.attnum > 0 AND NOT a.attisdropped
  AND a.atttypid = 'timestamptz'::regtype AND (a.attname = %(lease)s) = %(leases)s
GROUP BY c.relname ORDER BY c.relname"""


def age(conn: Connection[Any], by: float | timedelta, *, of: Aged) -> int:
    """Makes rows of one kind older by so many seconds, in the caller's transaction; returns how many there were.

    Raises WrongTransaction in a database that was not made by the fixture, InvalidInput for an unknown kind or a time
    that is not positive. Other sessions see it once the caller commits.
    """
    if of not in TABLES:
        raise InvalidInput(f"{of!r} is nothing that ages", field="of", hint=f"one of: {', '.join(TABLES)}")
    older = by if isinstance(by, timedelta) else timedelta(seconds=by)
    if older <= timedelta(0):
        raise InvalidInput("the time is not positive", field="by", hint="give seconds or a timedelta")
    require_made_here(conn)
    aged = 0
    with conn.cursor(row_factory=tuple_row) as cursor:
        wanted = {"tables": list(TABLES[of]), "lease": LEASE, "leases": of == "leases"}
        for table, columns in cursor.execute(COLUMNS, wanted).fetchall():
            moved = [sql.SQL("{0} = {0} - %(older)s").format(sql.Identifier(column)) for column in columns]
            statement = sql.SQL("UPDATE {} SET {}").format(
                sql.Identifier("fencepost", table), sql.SQL(", ").join(moved)
            )
            aged += cursor.execute(statement, {"older": older}).rowcount
    return aged
