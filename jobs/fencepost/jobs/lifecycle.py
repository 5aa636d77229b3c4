"""Who owns the lifecycle of a class: exactly one implementation claims, retries, reaps and completes its jobs.

    hand_over   an authority admin gives a class to another implementation, or back (``to=FENCEPOST``)
    own         the other implementation proves, in each of its transactions, that the class is its own
    take_over   it takes queued jobs out of here, in the transaction that puts them into its own store
    give_back   it gives them back, in the transaction that removes them there

To drain a class: pause it, wait until what runs has ended, hand it over. What is submitted meanwhile or later is accepted and
waits for whoever owns the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString
from uuid import UUID

from psycopg import Connection
from psycopg.rows import class_row, tuple_row

from fencepost.jobs.authority import By

__all__ = ["FENCEPOST", "Taken", "give_back", "hand_over", "own", "take_over"]

FENCEPOST = "fencepost"
"""The implementation that owns a class unless it was handed over."""

HAND_OVER: LiteralString = """
SELECT fencepost.hand_over(%(class)s, %(to)s, %(version)s, %(actor)s, %(reason)s, %(evidence)s)"""
OWN: LiteralString = "SELECT fencepost.own(%(class)s, %(implementation)s)"
TAKE_OVER: LiteralString = """
SELECT tenant, operation, args, source_event, priority, run_at, attempts
FROM fencepost.take_over(%(class)s, %(implementation)s, %(limit)s)"""
GIVE_BACK: LiteralString = """
SELECT fencepost.give_back(%(class)s, %(implementation)s, %(tenants)s::text[], %(operations)s::text[], %(attempts)s::integer[])"""


@dataclass(frozen=True, slots=True)
class Taken:
    """A job as its new owner needs it; ``attempts`` are those that it has used. The arguments are not shown."""

    tenant: str
    operation: str
    args: bytes
    source_event: UUID | None
    priority: int
    run_at: datetime
    attempts: int

    def __repr__(self) -> str:
        return f"Taken(tenant={self.tenant!r}, operation={self.operation!r}, attempts={self.attempts})"


def hand_over(conn: Connection[Any], by: By, job_class: str, *, to: str) -> str:
    """After the caller's commit ``to`` owns the class, and nobody else claims it; returns whose it was.

    Waits at most five seconds for the claims under way (LockNotAvailable). Raises SecondOwner while its jobs run, EffectOpen,
    EvidenceMissing (from another implementation, whose work nobody here can see), UnknownClass, WrongVersion, NotArmed.
    """
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(HAND_OVER, {"class": job_class, "to": to} | by.values()).fetchone()
    assert row is not None
    return str(row[0])


def own(conn: Connection[Any], job_class: str, implementation: str) -> None:
    """Until the caller's transaction ends this implementation owns the class; SecondOwner when it does not. NotArmed."""
    conn.execute(OWN, {"class": job_class, "implementation": implementation})


def take_over(conn: Connection[Any], job_class: str, implementation: str, limit: int = 1000) -> list[Taken]:
    """Queued jobs that are not here any more after the caller's commit: store them in this transaction.

    At most ``limit``; an empty list at the end. Jobs with an effect of theirs on record stay. Submitted again, a job that was
    taken over is the same job and starts nothing here. Raises SecondOwner, NotArmed.
    """
    values = {"class": job_class, "implementation": implementation, "limit": limit}
    with conn.cursor(row_factory=class_row(Taken)) as cursor:
        return cursor.execute(TAKE_OVER, values).fetchall()


def give_back(conn: Connection[Any], job_class: str, implementation: str, jobs: Sequence[tuple[str, str, int]]) -> None:
    """Jobs (tenant, operation, attempts used) are here again after the caller's commit: remove them in this transaction.

    All of them or none. They wait until fencepost owns the class again. Raises SecondOwner, NotArmed, InvalidInput.
    """
    values = {
        "class": job_class,
        "implementation": implementation,
        "tenants": [tenant for tenant, _, _ in jobs],
        "operations": [operation for _, operation, _ in jobs],
        "attempts": [attempts for _, _, attempts in jobs],
    }
    conn.execute(GIVE_BACK, values)
