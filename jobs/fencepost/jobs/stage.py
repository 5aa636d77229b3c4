"""Staging: what an attempt computed is kept for its successor, without a lease and without any right to publish."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, LiteralString
from uuid import UUID

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.fence import Fence
from fencepost.schemas.errors import InvalidInput

__all__ = ["RESULT_BYTES_MAX", "STAGE", "STAGED", "Staged", "dump", "load", "stage", "staged"]

RESULT_BYTES_MAX = 1024 * 1024
STAGE: LiteralString = """
SELECT fencepost.stage(%(tenant)s, %(operation)s, %(class)s, %(attempt)s, %(result)s)"""
STAGED: LiteralString = """
SELECT attempt, result, staged_at FROM fencepost.staged(%(tenant)s, %(operation)s, %(class)s)"""


@dataclass(frozen=True, slots=True)
class Staged:
    """An immutable candidate: the result, which attempt computed it, and when the database took it."""

    attempt: UUID
    result: Any = field(repr=False)
    staged_at: datetime


def stage(conn: Connection[Any], f: Fence, result: object) -> bool:
    """Stores the candidate of this attempt, in the caller's transaction; True when it was the attempt's first.

    Works after the lease was lost. Immutable: a second candidate of the same attempt changes nothing. ``result`` is
    JSON of at most 1 MiB. Raises StaleFence (attempt) when this attempt never held the job, InvalidInput.
    """
    raw = dump(result, "result")
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(STAGE, f.parameters() | {"result": raw}).fetchone()
    assert row is not None
    return bool(row[0])


def staged(conn: Connection[Any], f: Fence) -> Staged | None:
    """The newest candidate that any attempt staged for this job, or None."""
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(STAGED, f.parameters()).fetchone()
    return None if row is None else Staged(attempt=row[0], result=load(bytes(row[1])), staged_at=row[2])


def dump(value: object, name: str, *, most: int = RESULT_BYTES_MAX) -> bytes:
    """Plain JSON of at most ``most`` bytes, or InvalidInput naming ``name``. No digest is taken of it: floats are welcome."""
    try:
        raw = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError):
        raise InvalidInput(f"{name} is not JSON", field=name, hint="use objects, lists, text, numbers") from None
    if len(raw) > most:
        raise InvalidInput(f"{name} has {len(raw)} bytes, at most {most} are allowed", field=name)
    return raw


def load(raw: bytes) -> Any:
    """What ``dump`` was given."""
    return json.loads(raw)
