"""Cancelling takes authority away, not history; what a provider may have done stays on the record."""

from __future__ import annotations

from typing import Any, Literal, LiteralString, cast

from psycopg import Connection
from psycopg.rows import tuple_row

__all__ = ["CANCEL", "REQUEUE", "Verdict", "cancel", "requeue"]

Verdict = Literal["cancelled", "already_cancelled", "too_late"]

CANCEL: LiteralString = """
SELECT fencepost.cancel(%(tenant)s, %(operation)s, %(class)s, %(actor)s, %(reason)s)"""
REQUEUE: LiteralString = """
SELECT fencepost.requeue(%(tenant)s, %(operation)s, %(class)s, %(actor)s, %(reason)s)"""


def cancel(conn: Connection[Any], tenant: str, operation: str, job_class: str, *, actor: str, reason: str) -> Verdict:
    """After the caller's commit nothing of this job is published or begun any more, and no retry is scheduled.

    ``too_late``: it was done already and stays done. Effects keep their state; a pending one turns unknown at its own
    deadline. Run it in a transaction of its own, or before any domain write (lock order). ``actor`` and ``reason``
    are recorded. Raises UnknownJob, NotArmed.
    """
    return cast(Verdict, _decide(conn, CANCEL, tenant, operation, job_class, actor, reason))


def requeue(conn: Connection[Any], tenant: str, operation: str, job_class: str, *, actor: str, reason: str) -> None:
    """Gives a poison or cancelled job a fresh budget and queues it, in the caller's transaction; who and why is recorded.

    Raises EffectOpen while an effect is pending or unknown, StaleFence (state) for other jobs, UnknownJob, NotArmed.
    """
    _decide(conn, REQUEUE, tenant, operation, job_class, actor, reason)


def _decide(
    conn: Connection[Any],
    statement: LiteralString,
    tenant: str,
    operation: str,
    job_class: str,
    actor: str,
    reason: str,
) -> object:
    parameters = {"tenant": tenant, "operation": operation, "class": job_class, "actor": actor, "reason": reason}
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(statement, parameters).fetchone()
    assert row is not None
    return row[0]
