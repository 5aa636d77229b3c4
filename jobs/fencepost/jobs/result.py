"""Results: what a job returned, kept in the commit that completed it, or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, LiteralString
from uuid import UUID

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.fence import Fence
from fencepost.jobs.stage import dump, load
from fencepost.schemas.identity import as_class, as_operation, as_tenant

__all__ = ["COMPLETE_WITH", "KEPT_BYTES_MAX", "RESULT", "Result", "complete_with", "keepable", "result"]

KEPT_BYTES_MAX = 64 * 1024
COMPLETE_WITH: LiteralString = """
SELECT fencepost.complete_with(%(tenant)s, %(operation)s, %(class)s, %(generation)s, %(attempt)s, %(owner)s, %(epoch)s,
                               %(result)s)"""
RESULT: LiteralString = """
SELECT result, attempt, at FROM fencepost.result(%(tenant)s, %(operation)s, %(class)s)"""


@dataclass(frozen=True, slots=True)
class Result:
    """What the attempt that completed the job returned, and when."""

    value: Any = field(repr=False)
    attempt: UUID
    at: datetime


def result(conn: Connection[Any], *, tenant: str, operation: str, job_class: str) -> Result | None:
    """What the job returned; None while it is not done, and where it returned nothing."""
    which = {"tenant": as_tenant(tenant), "operation": as_operation(operation), "class": as_class(job_class)}
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(RESULT, which).fetchone()
    return None if row is None else Result(load(bytes(row[0])), row[1], row[2])


def complete_with(conn: Connection[Any], f: Fence, kept: bytes) -> None:
    """Completes the job and keeps what it returned, in the caller's transaction; raises as ``complete`` does."""
    conn.execute(COMPLETE_WITH, f.parameters() | {"result": kept})


def keepable(value: object) -> bytes:
    """Its JSON of at most 64 KiB, or InvalidInput."""
    return dump(value, "result", most=KEPT_BYTES_MAX)
