"""Ending an attempt without a result: retried with backoff, set aside as poison, or blocked by an open effect."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, LiteralString, cast

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.fence import Fence
from fencepost.schemas.identity import as_name

__all__ = ["FAIL", "RELEASE", "Became", "fail", "release"]

Became = Literal["queued", "blocked", "poison"]

FAIL: LiteralString = """
SELECT fencepost.fail(%(tenant)s, %(operation)s, %(class)s, %(generation)s, %(attempt)s, %(owner)s, %(epoch)s,
                      %(reason)s, %(detail)s, %(delay)s, %(final)s)"""
RELEASE: LiteralString = """
SELECT fencepost.release(%(tenant)s, %(operation)s, %(class)s, %(generation)s, %(attempt)s, %(owner)s, %(epoch)s)"""


def fail(
    conn: Connection[Any],
    f: Fence,
    reason: str,
    *,
    detail: str = "",
    delay: timedelta | None = None,
    final: bool = False,
) -> Became:
    """Ends the attempt, in the caller's transaction; returns what the job became.

    ``reason`` is a code (lower-case words), ``detail`` at most 500 characters that name no content. The retry waits
    ``delay``, by default the class's backoff; ``final`` makes poison at once. An open effect always blocks: it turns
    unknown and the job waits for evidence. Raises StaleFence when this attempt is no longer current.
    """
    parameters = f.parameters() | {
        "reason": as_name(reason, "reason"),
        "detail": detail,
        "delay": delay,
        "final": final,
    }
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(FAIL, parameters).fetchone()
    assert row is not None
    return cast(Became, row[0])


def release(conn: Connection[Any], f: Fence) -> Became:
    """Gives the claim back as a worker that stops does, in the caller's transaction; the attempt is not charged.

    With an open effect the job is blocked and the effect unknown. Raises StaleFence.
    """
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(RELEASE, f.parameters()).fetchone()
    assert row is not None
    return cast(Became, row[0])
