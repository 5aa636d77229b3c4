"""Renewing: only the current attempt extends its lease, and only before it ended."""

from __future__ import annotations

from typing import Any, LiteralString

from psycopg import Connection

from fencepost.jobs.fence import Fence

__all__ = ["RENEW", "renew"]

RENEW: LiteralString = """
SELECT fencepost.renew(%(tenant)s, %(operation)s, %(class)s, %(generation)s, %(attempt)s, %(owner)s, %(epoch)s)"""


def renew(conn: Connection[Any], f: Fence) -> None:
    """Extends the lease by the class's lease from now (database clock), in the caller's transaction.

    Raises StaleFence when the lease ended, even if nobody took over, NotArmed, and psycopg.errors.LockNotAvailable
    when another transaction held the job for half a second: the lease is then what it was.
    """
    conn.execute(RENEW, f.parameters())
