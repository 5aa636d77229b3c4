"""Which transactions committed before a rotation did: read from the write-ahead log, not from any clock.

Every commit is one record of that log, and the log is one sequence: it is the order in which the commits happened, and the
order in which a recovery would bring them back. So it is exact where times are not, and it costs what is measured nothing,
where a counter behind a lock would make the commits wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, LiteralString

from support.jobs import Conn
from support.processes import wait_for

READER: LiteralString = "CREATE EXTENSION IF NOT EXISTS pg_walinspect"
PLACE: LiteralString = "SELECT pg_current_wal_insert_lsn()::text"
NUMBER: LiteralString = "SELECT pg_current_xact_id()::text"
# A session counts until its commit can be seen.
ENDED: LiteralString = """
SELECT NOT EXISTS (SELECT FROM pg_stat_activity AS a
                   WHERE a.datname = current_database() AND age(a.backend_xid) > age(%(number)s::xid8::xid))"""
SEEN: LiteralString = "SELECT pg_current_snapshot()::text"
ROTATION: LiteralString = """
SELECT l.xmin::text FROM fencepost.authority_log AS l
WHERE l.kind = 'rotated' AND (l.detail ->> 'epoch')::bigint = %(epoch)s"""
COMMITS: LiteralString = """
SELECT w.xid::text FROM pg_get_wal_records_info(%(place)s::pg_lsn, pg_current_wal_flush_lsn()) AS w
WHERE w.resource_manager = 'Transaction' AND w.record_type = 'COMMIT' ORDER BY w.start_lsn"""

WITHIN = 20.0


@dataclass(frozen=True, slots=True)
class Point:
    """A place in the log, and a snapshot that sees everything that committed before it."""

    place: str
    snapshot: str


@dataclass(frozen=True, slots=True)
class Before:
    """Everything that committed before a rotation: what the snapshot sees, and these transactions after it."""

    snapshot: str
    commits: tuple[str, ...]

    def values(self) -> dict[str, object]:
        """As parameters of a statement."""
        return {"snapshot": self.snapshot, "commits": list(self.commits)}


def point(conn: Conn) -> Point:
    """A point of now; `conn` is in autocommit.

    A commit is in the log a moment before it can be seen. Whatever is in the log before the place has a smaller number than
    the transaction that read the place, so once no such transaction is at work a snapshot sees all of it.
    """
    with conn.transaction():
        place = _one(conn, PLACE)
        number = _one(conn, NUMBER)
    wait_for(lambda: _one(conn, ENDED, {"number": number}), WITHIN, "the transactions of before to end")
    return Point(place, _one(conn, SEEN))


def before(conn: Conn, found: Point, epoch: int) -> Before:
    """What committed before the rotation to this epoch, which was asked for after the point and has returned."""
    rotation = _one(conn, ROTATION, {"epoch": epoch})
    commits = [row[0] for row in conn.execute(COMMITS, {"place": found.place}).fetchall()]
    return Before(found.snapshot, tuple(commits[: commits.index(rotation)]))


def _one(conn: Conn, statement: LiteralString, values: dict[str, object] | None = None) -> Any:
    row = conn.execute(statement, values).fetchone()
    assert row is not None
    return row[0]
