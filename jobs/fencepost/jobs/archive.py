"""Finished jobs move into the archive in bounded batches, and months of the archive go as a whole; nothing that is open does.

The proof is PostgreSQL's (`sql/functions/jobs/archive.sql`): each batch is one transaction that passes by what others hold. Here
is only who asks for the next one, and when to begin anew.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, LiteralString
from uuid import UUID

from psycopg import Connection
from psycopg.errors import LockNotAvailable
from psycopg.rows import tuple_row

from fencepost.schemas.identity import as_class, as_text

__all__ = ["ARCHIVE", "DROP", "KEEP", "KEEP_ARCHIVE", "Archiving", "drop_archives", "keep_archive", "keep_finished"]

ARCHIVE: LiteralString = "SELECT archived, after FROM fencepost.archive_jobs(%(after)s::bigint, %(limit)s::integer)"
DROP: LiteralString = "SELECT fencepost.drop_archives(%(dry)s)"
KEEP: LiteralString = "SELECT fencepost.set_job_retention(%(class)s, %(keep)s::interval, %(actor)s, %(reason)s)"
KEEP_ARCHIVE: LiteralString = "SELECT fencepost.set_archive_retention(%(keep)s::interval, %(actor)s, %(reason)s)"
LEASE: LiteralString = (
    "SELECT fencepost.lease_duty('archive of jobs', %(owner)s::uuid, make_interval(secs => %(seconds)s::float8))"
)
DECLARED: LiteralString = "SELECT EXISTS (SELECT FROM fencepost.job_retention)"

BATCH = 200
TURN_SECONDS = 1.0
# Between two walks through everything that is not archived; and never more than a tenth of the time is spent walking.
PASS_SECONDS = 300.0
WALK_SHARE = 10.0
LEASE_SECONDS = 600.0

log = logging.getLogger("fencepost.jobs.archive")


@dataclass(slots=True)
class Archiving:
    """Walks through finished jobs again and again, a bounded share at each turn; needs the role maintenance.

    Any number of processes may do it: what one of them holds, the others pass by. With an ``owner`` one at a time walks, and
    another one ten minutes after it has ended. ``dropped``: the months that went after the last walk.
    """

    limit: int = BATCH
    pause: float = PASS_SECONDS
    owner: UUID | None = None
    dropped: list[str] = field(default_factory=list[str])
    _after: int | None = None
    _walked: float = 0.0
    _next: float = 0.0

    def turn(self, conn: Connection[Any], *, seconds: float = TURN_SECONDS) -> int:
        """Moves what it can within ``seconds``, on an autocommit connection; how many jobs. Nothing between two walks.

        Raises NotArmed, and InsufficientPrivilege without the role maintenance.
        """
        began = time.monotonic()
        if began < self._next:
            return 0
        if not self._leads(conn, LEASE_SECONDS):
            self._after, self._walked, self._next = None, 0.0, began + self.pause
            return 0
        moved = 0
        while self._after is not None or _declared(conn):
            archived, self._after = _batch(conn, self._after or 0, self.limit)
            moved += archived
            if self._after is None or time.monotonic() - began >= seconds:
                break
        now = time.monotonic()
        self._walked += now - began
        if self._after is None:
            self._next = now + max(self.pause, self._walked * WALK_SHARE)
            self._walked = 0.0
            self._leads(conn, self._next - now + LEASE_SECONDS)
            try:
                self.dropped = drop_archives(conn)
            except LockNotAvailable:
                log.info("the archive is being read: what is over is dropped after the next walk")
        return moved

    def _leads(self, conn: Connection[Any], seconds: float) -> bool:
        if self.owner is None:
            return True
        with conn.cursor(row_factory=tuple_row) as cursor:
            return cursor.execute(LEASE, {"owner": self.owner, "seconds": seconds}).fetchone() == (True,)


def drop_archives(conn: Connection[Any], *, dry_run: bool = False) -> list[str]:
    """Drops the months of the archive whose time is over, and says which; a dry run says it only."""
    with conn.cursor(row_factory=tuple_row) as cursor:
        return [str(name) for (name,) in cursor.execute(DROP, {"dry": dry_run})]


def keep_finished(conn: Connection[Any], job_class: str, keep: timedelta | None, *, actor: str, reason: str) -> None:
    """Declares how long finished jobs of a class stay as they are, in the caller's transaction; None: for ever.

    Raises InvalidInput (``finished_keep``) for less than an hour, UnknownClass.
    """
    who = {"actor": as_text(actor, "actor"), "reason": as_text(reason, "reason")}
    conn.execute(KEEP, {"class": as_class(job_class), "keep": keep} | who)


def keep_archive(conn: Connection[Any], keep: timedelta | None, *, actor: str, reason: str) -> None:
    """Declares how long the archive keeps what it was given, in the caller's transaction; None: for ever.

    Raises InvalidInput (``archive_keep``) for less than a day.
    """
    conn.execute(KEEP_ARCHIVE, {"keep": keep, "actor": as_text(actor, "actor"), "reason": as_text(reason, "reason")})


def _declared(conn: Connection[Any]) -> bool:
    with conn.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(DECLARED).fetchone() == (True,)


def _batch(conn: Connection[Any], after: int, limit: int) -> tuple[int, int | None]:
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(ARCHIVE, {"after": after, "limit": limit}).fetchone()
    assert row is not None
    return row[0], row[1]
