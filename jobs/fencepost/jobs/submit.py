"""Scheduling: the job is in the caller's commit, together with whatever else that transaction does, or not at all."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from datetime import datetime
from typing import Any, LiteralString, cast, overload
from uuid import UUID

from psycopg.rows import tuple_row
from pydantic import BaseModel

from fencepost.schemas import content
from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.event import Event
from fencepost.schemas.identity import as_class, as_operation, as_tenant
from fencepost.schemas.jsonable import jsonable
from fencepost.schemas.transaction import AsyncTransaction, Transaction, connection_of, connection_of_async, is_async

__all__ = ["PRIORITY_MAX", "SUBMIT", "submit"]

PRIORITY_MAX = 1_000_000
SUBMIT: LiteralString = """
SELECT fencepost.submit(%(tenant)s, %(operation)s, %(class)s, %(args)s, %(binding)s, %(source_event)s, %(run_at)s,
                        %(priority)s)"""


@overload
def submit(
    tx: Transaction,
    job_class: str,
    *,
    tenant: str,
    operation: str,
    args: Mapping[str, object] | BaseModel,
    run_at: datetime | None = None,
    priority: int = 0,
    source_event: UUID | None = None,
) -> bool: ...
@overload
def submit(
    tx: AsyncTransaction,
    job_class: str,
    *,
    tenant: str,
    operation: str,
    args: Mapping[str, object] | BaseModel,
    run_at: datetime | None = None,
    priority: int = 0,
    source_event: UUID | None = None,
) -> Awaitable[bool]: ...
def submit(
    tx: Transaction | AsyncTransaction,
    job_class: str,
    *,
    tenant: str,
    operation: str,
    args: Mapping[str, object] | BaseModel,
    run_at: datetime | None = None,
    priority: int = 0,
    source_event: UUID | None = None,
) -> bool | Awaitable[bool]:
    """Schedules a job in the caller's transaction; True when it is new, False when the same job was there already.

    ``tx`` is a connection of psycopg, a connection or session of SQLAlchemy (or SQLModel) on psycopg, or Django's
    connection inside ``atomic()``; with one for asyncio the result is awaited. Never commits, rolls back, flushes or
    changes the session. ``args`` become
    JSON of the restricted profile (no floating point) of at most 1 MiB; ``run_at`` is an aware datetime, the earliest
    start by the database clock; a higher ``priority`` goes first.

    Raises WrongTransaction on an autocommit connection outside a transaction and on other drivers, OperationConflict when the operation
    has a job of this class with other args, InvalidInput naming the field before anything is written.
    """
    raw = arguments(args)
    parameters: dict[str, object] = {
        "tenant": as_tenant(tenant),
        "operation": as_operation(operation),
        "class": as_class(job_class),
        "args": raw,
        "binding": content.binding(raw),
        "source_event": source_event,
        "run_at": as_instant(run_at),
        "priority": as_priority(priority),
    }
    if is_async(tx):
        return _submit_async(cast(AsyncTransaction, tx), parameters)
    with connection_of(cast(Transaction, tx)).cursor(row_factory=tuple_row) as cursor:
        return _created(cursor.execute(SUBMIT, parameters).fetchone())


async def _submit_async(tx: AsyncTransaction, parameters: dict[str, object]) -> bool:
    async with (await connection_of_async(tx)).cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(SUBMIT, parameters)
        return _created(await cursor.fetchone())


def _created(row: tuple[Any, ...] | None) -> bool:
    assert row is not None
    return bool(row[0])


def arguments(args: Mapping[str, object] | BaseModel) -> bytes:
    """The bytes that a job carries; InvalidInput naming the member that cannot be carried."""
    if isinstance(args, Event):
        return args.payload()
    value = jsonable(args.model_dump(exclude_none=True) if isinstance(args, BaseModel) else args, "args")
    if not isinstance(value, dict):
        raise InvalidInput("args are not a JSON object", field="args", hint="give a mapping or a model")
    return content.encode(value)


def as_instant(run_at: datetime | None) -> datetime | None:
    """An aware datetime, or InvalidInput."""
    if run_at is not None and run_at.utcoffset() is None:
        raise InvalidInput(
            "run_at is a time without a zone", field="run_at", hint="make it aware, e.g. with tzinfo=UTC"
        )
    return run_at


def as_priority(priority: int) -> int:
    """A whole number within bounds, or InvalidInput."""
    if type(priority) is not int or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise InvalidInput(
            f"priority is not a whole number within ±{PRIORITY_MAX}", field="priority", hint="0 is the default"
        )
    return priority
